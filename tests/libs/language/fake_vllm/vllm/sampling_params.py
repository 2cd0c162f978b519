from types import SimpleNamespace


class RequestOutputKind:
    DELTA = "delta"


class StructuredOutputsParams(SimpleNamespace):
    pass
