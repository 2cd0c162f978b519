"""A headless Chromium for tests, without a driver: its DevTools over a pipe."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import psutil

from waiting import wait_for


class Chromium:
    """A headless Chromium with one page, asked over its pipe: messages of its DevTools, each ended by a zero byte."""

    def __init__(self, folder: Path) -> None:
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        command = [
            "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{read} 4>&{write}', "bash", *command],
            pass_fds=(read, write), env={**os.environ, "HOME": str(folder)},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(read)
        os.close(write)
        self._answers = os.fdopen(self._read, "rb")
        self._number = 0
        self._session = ""
        targets = self.call("Target.getTargets")["targetInfos"]
        self._attach(next(each["targetId"] for each in targets if each["type"] == "page"))

    def _attach(self, target: str) -> None:
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def show(self, address: str, is_hidden: bool = False) -> None:
        """Open an address in a tab in place of the page. is_hidden: another tab is in front of it"""
        self._session, shown = "", self.call("Target.getTargets")["targetInfos"]
        self._attach(self.call("Target.createTarget", url=address)["targetId"])
        for each in shown:
            if each["type"] == "page":
                self.call("Target.closeTarget", targetId=each["targetId"])
        if is_hidden:
            session, self._session = self._session, ""
            self.call("Target.createTarget", url="about:blank")
            self._session = session

    def call(self, method: str, **params: object) -> dict[str, Any]:
        answer = self._ask(method, params)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        session = {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message | session).encode() + b"\0")
        while True:
            letters = bytearray()
            while (letter := self._answers.read(1)) != b"\0":
                assert letter, "chromium ended"
                letters += letter
            answer: dict[str, Any] = json.loads(letters)
            if answer.get("id") == self._number:
                return answer

    def run(self, script: str) -> Any:
        """The value of a script in the page; None while it is being replaced."""
        answer = self._ask("Runtime.evaluate", {"expression": script, "returnByValue": True})
        return answer.get("result", {}).get("result", {}).get("value")

    def close(self) -> None:
        family = [self.process.pid, *(each.pid for each in psutil.Process(self.process.pid).children(recursive=True))]
        os.close(self._write)  # its end of the pipe: Chromium ends
        try:
            self.process.wait(5.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._answers.close()
        wait_for(lambda: not any(psutil.pid_exists(pid) for pid in family), what="the end of Chromium")
