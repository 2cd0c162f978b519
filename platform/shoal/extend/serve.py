"""Endpoints, for libraries: predictors, formats, protocols and specs of endpoints."""

from typing import TYPE_CHECKING

from shoal.plugins.lazy import load_on_demand

if TYPE_CHECKING:
    from shoal.batching.batcher import Batcher, BatcherCounts, PendingBatch, Prediction
    from shoal.client.endpoint_status import EndpointStatus
    from shoal.client.payload import ArrayLike, decode_answer
    from shoal.client.retry import EndpointRequest, Reply, RetryPolicy, decode_error, request_with_retries
    from shoal.client.streamed_text import PATHS, build_body
    from shoal.client.tls import create_tls_context
    from shoal.client.transport import AsyncTransport
    from shoal.open_inference.binary_tensors import from_binary, to_binary
    from shoal.open_inference.pictures import is_integer, read_picture, summarize_error
    from shoal.open_inference.request_schema import REFUSED_PARAMETERS, RequestSchema, format_tensor_type
    from shoal.open_inference.rows import decode_rows
    from shoal.serve.controller.audit import AUDIT_FILE, AuditLog, read_audit_log
    from shoal.serve.http.admin import RestHandlers
    from shoal.serve.http.codec import HttpCodec, ModelCodec
    from shoal.serve.http.routes import ADMIN_ACTIONS, UNAUTHENTICATED_ACTIONS, RouteAction, RouteTarget
    from shoal.serve.http.stream_guard import guard_stream
    from shoal.serve.messages.counts import SECONDS, Histogram, LibraryMetric
    from shoal.serve.messages.infer_call import InferCall, Outputs
    from shoal.serve.messages.inference import (
        ANONYMOUS,
        CLIENT_GONE,
        Caller,
        Disconnected,
        ModelManagerProtocol,
        ServedModelProtocol,
        TracerProtocol,
        format_origin,
    )
    from shoal.serve.messages.model_errors import to_inference_error
    from shoal.serve.model.formats import open_template
    from shoal.serve.model.formats.module import check_finite, check_names, check_shape
    from shoal.serve.model.formats.template import Arrays, Forward, TemplateConfig
    from shoal.serve.model.formats.torch_forward import (
        choose_kernels,
        make_torch_forward,
        name_all_outputs,
        select_outputs,
        to_array,
        to_tensor,
    )
    from shoal.serve.model.hooks import find_hook
    from shoal.serve.model.onnx_trace import name_dynamic_axes, trace_to_onnx
    from shoal.serve.model.precision import PrecisionConverter
    from shoal.serve.model.predictor import LoadedModel, Predictor
    from shoal.serve.model.warm_up import DEFAULT_VARIABLE_SIZE, make_example
    from shoal.serve.on_ray.deployment import deploy
    from shoal.serve.protocol.access import FORWARDED_FROM_HEADER, AccessControl
    from shoal.serve.protocol.model_metadata import to_tensor_metadata
    from shoal.serve.protocol.pipeline import (
        PEER_HEADER,
        ModelCodecs,
        answer_inference,
        compute_deadline,
        decode_sized,
        encode_sized,
        read_side,
        start_trace,
    )
    from shoal.serve.protocol.request_lifecycle import (
        CLOSING_MESSAGE,
        Message,
        Receive,
        RequestLifecycle,
        RequestsInProgress,
        Scope,
        Send,
        decompress_in_thread,
        read_body,
    )
    from shoal.serve.replica.model_manager import ModelManager
    from shoal.serve.replica.peers import HttpRequest
    from shoal.serve.replica.served_model import ServedModel
    from shoal.serve.replica.shadow import SHADOW_WEIGHT
    from shoal.serve.replica.version_router import Track
    from shoal.serve.scaling import EndpointLoad, ModelLoad, ReplicaLoad, ScalePolicy
    from shoal.serve.spec.batch_layout import BatchLayout, has_batch_first
    from shoal.serve.spec.endpoint import DEFAULT_OBJECTIVE_S, EndpointSpec, GangSplit, GpuCount, TraceDestination
    from shoal.serve.spec.model_options import ModelOptions, TextOptions
    from shoal.serve.spec.model_source import EndpointModel, LiveModel, ModelPackage, RegisteredModel
    from shoal.serve.spec.scale import MAX_REPLICAS, ScaleSpec

__getattr__ = load_on_demand(__name__)
