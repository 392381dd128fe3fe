"""The world model of dreamerv3-torch.

Its networks differ from those of `worlds/rssm`; states, losses and replay format are
the same, except that the stochastic state may be Gaussian.
"""

from __future__ import annotations

import numpy as np
import torch

from reverie.api import Extras
from reverie.nets.dreamerv3_torch.decoder import DreamerV3TorchDecoder
from reverie.nets.dreamerv3_torch.encoder import DreamerV3TorchEncoder
from reverie.nets.dreamerv3_torch.heads import DreamerV3TorchHead
from reverie.spaces import Space, Spaces
from reverie.worlds.dreamerv3_torch.config import DreamerV3TorchConfig
from reverie.worlds.dreamerv3_torch.dynamics import DreamerV3TorchDynamics
from reverie.worlds.rssm.dynamics import RSSMState
from reverie.worlds.rssm.world import RSSM


class DreamerV3TorchWorld(RSSM):
    """Implements `api.LatentWorld`."""

    Dynamics = DreamerV3TorchDynamics  # type: ignore[assignment]
    Head = DreamerV3TorchHead
    config: DreamerV3TorchConfig  # type: ignore[assignment]
    dyn: DreamerV3TorchDynamics

    def _make_encoder(self, obs_space: Spaces) -> DreamerV3TorchEncoder:
        order, unscaled = self.config.key_order, self._unscaled(obs_space)
        return DreamerV3TorchEncoder(obs_space, self.networks.enc, order, unscaled)

    def _make_decoder(
        self, obs_space: Spaces, deter: int, stoch: int
    ) -> DreamerV3TorchDecoder:
        config = self.config
        return DreamerV3TorchDecoder(
            *(obs_space, deter, stoch, self.networks.dec, config.key_order),
            unscaled=self._unscaled(obs_space),
            sigmoid=config.image_output == "sigmoid",
            image_dist=config.image_dist,
        )

    def _unscaled(self, obs_space: Spaces) -> list[str]:
        """Return the keys of images not divided by 255 (setting `scale_images`)."""
        if self.config.scale_images == "all":
            return []
        return [key for key, s in obs_space.items() if s.is_image and key != "image"]

    @property
    def extras(self) -> Spaces:
        if self.config.classes:
            return super().extras
        deter, stoch = self.config.feature_widths
        return {
            "dyn/deter": Space(np.dtype(self.config.store), (deter,)),
            "dyn/stoch": Space(np.float32, (stoch,)),
        }

    def to_replay(self, states: RSSMState) -> Extras:
        if self.config.classes:
            return super().to_replay(states)
        store = getattr(torch, self.config.store)
        return {
            "dyn/deter": states.deter.detach().to(store),
            "dyn/stoch": states.stoch.detach().float()[..., 0],
        }

    def from_replay(self, extras: Extras) -> RSSMState:
        if self.config.classes:
            state = super().from_replay(extras)
        else:
            deter = extras["dyn/deter"].to(self.dtype)
            state = RSSMState(deter, extras["dyn/stoch"].to(self.dtype)[..., None])
        # rows without stored extras are all zero: use the initial state for them
        is_empty = (state.deter == 0).all(-1, keepdim=True)
        deter, stoch = self.initial(1)
        return RSSMState(
            torch.where(is_empty, deter[0], state.deter),
            torch.where(is_empty[..., None], stoch[0], state.stoch),
        )

    def initial(self, batch: int) -> RSSMState:
        with torch.no_grad():
            state = super().initial(batch)
        # copied, because the rows of a learned initial state share memory (`expand`)
        return RSSMState(*(x.clone() for x in state))
