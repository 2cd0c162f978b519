"""Networks, for libraries: networks and distributions."""

from typing import TYPE_CHECKING

from shoal.plugins.lazy import load_on_demand

if TYPE_CHECKING:
    from shoal.models.action_distribution import SquashedGaussian, mask_logits
    from shoal.models.decoder import Decoder
    from shoal.models.frame_encoder import RecurrentLayer, make_encoder
    from shoal.models.network_source import read_source
    from shoal.models.own_network import OwnNetwork

__getattr__ = load_on_demand(__name__)
