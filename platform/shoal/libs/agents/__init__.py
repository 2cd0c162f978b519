"""Training by agents that run anywhere and ask a model as any endpoint is asked: the tokens of their sessions."""

from shoal.plugins.library import Library

LIBRARY = Library("agents")
