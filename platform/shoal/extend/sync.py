"""Synchronizers, for libraries: synchronizers, and what their processes say to each other."""

from typing import TYPE_CHECKING

from shoal.plugins.lazy import load_on_demand

if TYPE_CHECKING:
    from shoal.channel.connection import Channel, ChannelAddress, ChannelListener, connect
    from shoal.channel.memory import MemoryAddress, create_memory, map_memory
    from shoal.channel.packing import Packer
    from shoal.channel.rpc import LATER, CallId, CurveKeys, Request, RpcClient, RpcService, answers, list_handlers
    from shoal.sync.config import SyncConfig, find_sync_config_type
    from shoal.sync.costs import EVICTED_BYTES, CostProbe, ServerCosts, load_probe
    from shoal.sync.synchronizer import Connection, RankSignals, RankSync, Replica, StateAccess, Synchronizer, Traffic

__getattr__ = load_on_demand(__name__)
