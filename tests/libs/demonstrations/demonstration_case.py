"""Where demonstrations of a test lie, and what lies there."""

from pathlib import Path

from rl_setting import EXPERIENCE
from shoal.libs.demonstrations.files import Demonstration, DemonstrationFiles
from shoal.rl.experience.demonstrations import DemonstrationSite
from shoal.rl.part_specs import DemonstrationsSpec
from shoal.store import open_store
from shoal.wire import ExperienceSpec

ACTOR = ("actor", 7)


def make_site(folder: Path, experience: ExperienceSpec = EXPERIENCE, **fields: object) -> DemonstrationSite:
    return DemonstrationSite(DemonstrationsSpec.parse(fields), experience, folder)


def read_all(folder: Path) -> dict[str, Demonstration]:
    return DemonstrationFiles([open_store(folder)]).read_sound()
