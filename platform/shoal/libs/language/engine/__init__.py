"""An engine that generates text: `submit`, `cancel`, `set_weights`, `observe`, `step`. Neither Ray nor HTTP."""

from shoal.libs.language.engine.request import Observation, Sampling, TextRequest, TokenEvent
from shoal.libs.language.engine.slot_engine import SlotEngine

__all__ = ["Observation", "Sampling", "SlotEngine", "TextRequest", "TokenEvent"]
