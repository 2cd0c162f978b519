"""Sensors' messages of an MQTT topic, and forecasts back; a private mosquitto for a run without a broker.

Called by the flow and by tests.
"""

from __future__ import annotations

import getpass
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from shoal.atomic_file import make_folder
from shoal.errors import ClusterError, ConfigError
from shoal.extend.cluster import end_programs, find_free_port
from shoal.libs.stream.messages import MessageParser
from shoal.libs.stream.mqtt_source import PUBLISHER, SEQUENCE, MqttSource
from shoal.libs.stream.spec import SensorTopicSpec

if TYPE_CHECKING:
    from shoal.libs.stream.trainer import SensorForecast

START_S = 10.0
END_S = 5.0
POLL_S = 0.02
# Queues without a limit: mosquitto drops silently beyond its default of 1,000 messages. Without mosquitto's limit of 20
# messages in flight, the client's receive maximum counts.
CONFIG = """
listener {port} 127.0.0.1
allow_anonymous true
persistence true
persistence_location {folder}/
autosave_interval 5
max_queued_messages 0
max_inflight_messages 0
set_tcp_nodelay true
log_dest file {folder}/mosquitto.log
user {user}
"""


class SensorSource(MqttSource):
    """width: values of a message; 0: any number. report: as of MqttSource"""

    def __init__(
        self, spec: SensorTopicSpec, width: int, report: Callable[..., None] = lambda kind, **details: None
    ) -> None:
        parser = MessageParser(width, spec.topic, spec.sensor_field, spec.value_field, spec.time_field)
        super().__init__(spec, parser, report)
        self._answers = spec.answers

    def publish_forecasts(self, forecasts: Sequence[SensorForecast]) -> None:
        """Send each at most once."""
        for forecast in forecasts if self._answers else ():
            message = forecast.message
            content = {
                "forecast": forecast.prediction,
                "time": message.time_s,
                PUBLISHER: message.publisher,
                SEQUENCE: message.sequence,
                "updates": forecast.num_updates,
            }
            self.publish(f"{self._answers}/{message.sensor}", msgspec.json.encode(content))


class PrivateBroker:
    """mosquitto on a free port of the loopback interface; its files are in `folder`. It ends with this process.

    Sessions outlive it: the next broker in the same folder holds them. Raises ConfigError when mosquitto
    is not installed, ClusterError when it does not start.
    """

    def __init__(self, folder: Path, port: int = 0) -> None:
        program = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")
        if program is None:
            problem = "a private broker needs mosquitto, which is not installed"
            raise ConfigError("mqtt.broker", "", problem, "apt-get install mosquitto, or name a broker")
        make_folder(folder)
        self.port = port or find_free_port()
        config = folder / "mosquitto.conf"
        config.write_text(CONFIG.format(port=self.port, folder=folder, user=getpass.getuser()))
        ends_with_this = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
        command = [*ends_with_this, program, "-c", str(config)]
        to = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdout=to, stderr=to, start_new_session=True)  # Ctrl-C is not for it
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                return
            except OSError:
                time.sleep(POLL_S)
        self.close()
        raise ClusterError(f"mosquitto did not start: see {folder}/mosquitto.log")

    @property
    def address(self) -> str:
        """HOST:PORT"""
        return f"127.0.0.1:{self.port}"

    def close(self) -> None:
        """End it; it saves its sessions. Idempotent."""
        end_programs([self._process], END_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
