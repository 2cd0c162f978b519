"""Decodes a body of rows into the tensors of a model, and encodes outputs as rows: `POST /v2/models/{m}/rows`.

A body is one JSON object, which gets one, or a list of them, which gets a list; `open_inference.rows` has their fields.
Called by `inference` in place of the codec of tensors, with the same interface. Errors are InferenceErrors: 400 for a
body that is no row, 422 with the `field` that does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from shoal.errors import DataError, InferenceError
from shoal.open_inference.messages import TensorMetadata
from shoal.open_inference.request_schema import RequestSchema
from shoal.open_inference.rows import decode_rows, encode_rows
from shoal.serve.http.response import RestResponse
from shoal.serve.messages.decoded_request import Arrays, DecodedRequest

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class RowsRequest(DecodedRequest, gc=False):
    """Rows as tensors. `is_single`: of one object, not of a list."""

    is_single: bool = False


class RowCodec:
    """Decodes rows to, and encodes answers of, one model. For any thread. `max_rows`, `batch_dim`: see
    `RequestSchema`."""

    has_bytes_inputs = True  # a body is read value by value

    def __init__(
        self,
        model_name: str,
        inputs: Sequence[TensorMetadata],
        outputs: Sequence[TensorMetadata],
        max_rows: int,
        batch_dim: Mapping[str, int | None] | None = None,
    ) -> None:
        self._model_name, self._inputs, self._outputs = model_name, inputs, outputs
        self._max_rows = 0 if batch_dim else max_rows
        self._schema = RequestSchema(inputs, outputs, max_rows)

    def decode(self, body: bytes, header_length: int | None = None) -> RowsRequest:
        """Decode a request. Raises InferenceError (400, 413, 422)."""
        if not self._max_rows:
            problem = f"model {self._model_name!r} has no batch in the first dimension of its tensors, so no rows"
            raise InferenceError(400, f"{problem}: send it tensors (.../infer)")
        try:
            content = _decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InferenceError(400, f"not a row: {error}") from None
        rows = content if isinstance(content, list) else [content]
        if not 0 < len(rows) <= self._max_rows:
            raise InferenceError(422, f"expected 1 to {self._max_rows} rows, got {len(rows)}")
        arrays: Arrays
        try:
            arrays = decode_rows(self._inputs, rows)
        except DataError as error:
            raise InferenceError(422, str(error), field=error.field) from None
        for spec in self._inputs:
            if not spec.kind:
                self._schema.check_tensor(spec.name, spec.datatype, arrays[spec.name].shape, {})
        return RowsRequest(arrays, len(rows), is_single=content is not rows)

    def encode(self, request: DecodedRequest, arrays: Arrays, version: int) -> RestResponse:
        """Encode the rows of the answer. Raises InferenceError (422) for an output that JSON cannot represent."""
        assert isinstance(request, RowsRequest)
        rows = encode_rows(self._outputs, arrays)
        body = _encode(rows[0] if request.is_single else rows)
        return RestResponse(200, body, headers=[(b"shoal-model-version", b"%d" % version)])
