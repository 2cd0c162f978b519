"""Pong of the Atari 2600: the frames of Mnih et al. (Nature 518, 2015, "Methods: preprocessing").

The emulator, ale-py, is licensed under GPL: it is the user's to install, and gymnasium imports it by its name.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import gymnasium
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

from shoal.errors import ConfigError

NEEDED = {"ale_py": "ale-py", "cv2": "opencv-python-headless"}  # modules, and the packages that have them
NUM_FRAMES = 4


def make_pong(size: int = 84, **kwargs: Any) -> Any:
    """Observes uint8 [4, size, size]: the last four frames, grey, every fourth of the emulator's 60 a second.

    A frame is the maximum of two, since the console draws some things in every other one. An episode begins with up to
    30 frames without an action. A side that has 21 points ends it: returns are from -21 to 21. Raises ConfigError.
    """
    for module, package in NEEDED.items():
        if find_spec(module) is None:
            raise ConfigError("env", "Pong-v0", f"needs {module}, which is not installed", f"pip install {package}")
    environment = gymnasium.make("ale_py:ALE/Pong-v5", frameskip=1, repeat_action_probability=0.0, **kwargs)
    return FrameStackObservation(AtariPreprocessing(environment, frame_skip=4, screen_size=size), NUM_FRAMES)
