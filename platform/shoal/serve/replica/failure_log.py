"""A model's own errors on requests: logged, reported to the controller, and concealed from callers.

Owned by a served model, on the event loop. The text of a model's exception may contain its code, paths or data.
"""

from __future__ import annotations

import logging
import secrets

from shoal.errors import InferenceError, ModelError
from shoal.serve.messages.replica_report import ModelFailure, truncate_reason

logger = logging.getLogger(__name__)


class FailureLog:
    """The failures of one model on this replica; `last` is the newest, None before.

    show_errors: whether callers receive the model's text
    """

    def __init__(self, model: str, show_errors: bool) -> None:
        self._model, self._show_errors = model, show_errors
        self.last: ModelFailure | None = None

    def to_answer(self, error: Exception, version: int) -> InferenceError:
        """The error that the caller receives: a rejection as it is, a model's own error as a reference to the log."""
        if isinstance(error, InferenceError) and not isinstance(error, ModelError):
            return error
        text = str(error) if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
        reference = secrets.token_hex(4)
        self.last = ModelFailure(reference, version, truncate_reason(text))
        logger.error("%s: version %d failed on a request (%s)", self._model, version, reference, exc_info=error)
        if self._show_errors:
            return InferenceError(500, f"this request failed: {text}")
        return InferenceError(500, f"the model failed on this request: its endpoint's log has the reason ({reference})")
