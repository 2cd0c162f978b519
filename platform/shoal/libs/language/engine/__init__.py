"""An engine that generates text: `submit`, `cancel`, `set_weights`, `observe`, `step`. Neither Ray nor HTTP."""

from shoal.libs.language.engine.request import Event, Observation, Request, Sampling
from shoal.libs.language.engine.slot_engine import SlotEngine

__all__ = ["Event", "Observation", "Request", "Sampling", "SlotEngine"]
