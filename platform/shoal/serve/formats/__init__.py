"""What kinds of models there are, and how each becomes something that runs: one module per format.

Called by the predictor alone. A template is made once per model; each version that it loads is a forward of its own.
"""

from shoal.serve.formats.template import Arrays, Forward, Template

__all__ = ["Arrays", "Forward", "Template"]
