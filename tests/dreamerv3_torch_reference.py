"""An independent computation of one update of dreamerv3-torch, for tests.

Random draws are replaced by the most likely class, or by the mean plus half a standard
deviation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from dreamerv3_torch_networks import (
    ACTOR,
    MODEL,
    SLOW,
    VALUE,
    Networks,
    two_hot_logp,
)

from reverie.nets.rng import Rng

DRAW = 0.5
"""Normal noise of all draws."""


class FixedDraws(Rng):
    """The same draws as those of the reference."""

    def __init__(self) -> None:
        pass

    def categorical(self, probs):
        return probs.argmax(-1)

    def normal(self, mean, std):
        return mean + DRAW * std

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def make_optimizers(state, lrs, seed=1, compiled: bool = False):
    """States of the three Adam optimizers after five steps, as `state_dict` writes."""
    g = torch.Generator().manual_seed(seed)
    optimizers = {}
    middle = "forward." if compiled else ""
    for path, prefix, lr in (
        (f"_wm.{middle}_model_opt._opt", MODEL, lrs[0]),
        (f"_task_behavior.{middle}_actor_opt._opt", ACTOR, lrs[1]),
        (f"_task_behavior.{middle}_value_opt._opt", VALUE, lrs[2]),
    ):
        tensors = [v for k, v in state.items() if k.startswith(prefix)]
        entries = {
            i: {
                "step": torch.tensor(5.0),
                "exp_avg": 0.01 * torch.randn(x.shape, generator=g),
                "exp_avg_sq": 0.01 * torch.rand(x.shape, generator=g) + 1e-3,
            }
            for i, x in enumerate(tensors)
        }
        group = {"lr": lr, "params": list(range(len(tensors)))}
        optimizers[path] = {"state": entries, "param_groups": [group]}
    return optimizers


class Reference(Networks):
    """One update with the state of a checkpoint."""

    def __init__(self, state, optimizers, options, shapes, *, gradient, mix, lrs):
        state = {k: v.clone().requires_grad_() for k, v in state.items()}
        super().__init__(state, options, shapes, noise=DRAW)
        self.optimizers, self.lrs = optimizers, lrs
        self.gradient, self.mix = gradient, mix
        self.momentum = {}

    # Actions

    def act(self, dist):
        if self.discrete:
            (p,) = dist
            onehot = F.one_hot(p.argmax(-1), p.shape[-1]).float()
            return onehot + (p - p.detach())
        action = dist[0] + DRAW * dist[1]
        return action * (1 / action.abs().clamp(min=1)).detach()

    def logp_and_entropy(self, dist, action):
        if self.discrete:
            log = torch.log(dist[0])
            logp = log.gather(-1, action.argmax(-1, keepdim=True))[..., 0]
            return logp, -(dist[0] * log).sum(-1)
        normal = torch.distributions.Normal(*dist)
        return normal.log_prob(action).sum(-1), normal.entropy().sum(-1)

    # Losses

    def world_loss(self, batch):
        """`batch` has the observations, action (that led to the row), reward and
        flags."""
        embed = self.encode(batch)
        deter, stoch, post = self.observe(embed, batch["action"], batch["is_first"])
        prior, feat = self.prior(deter), torch.cat([stoch, deter], -1)
        losses = {
            key: -self.decoder_logp(key, output, batch[key])
            for key, output in self.decode(feat).items()
        }
        reward, _ = self.scalar(feat, "_wm.heads.reward.", "Reward")
        losses["rew"] = -two_hot_logp(reward, batch["reward"])
        cont, target = self.cont(feat), 1 - batch["is_terminal"].float()
        losses["con"] = -(
            target * F.logsigmoid(cont) + (1 - target) * F.logsigmoid(-cont)
        )
        fixed_post, fixed_prior = ([x.detach() for x in y] for y in (post, prior))
        free = self.options["kl_free"]
        losses["dyn"] = self.kl(fixed_post, prior).clamp(min=free)
        losses["rep"] = self.kl(post, fixed_prior).clamp(min=free)
        scales = {name: self.options[f"{name}_scale"] for name in ("dyn", "rep")}
        total = sum(scales.get(k, 1.0) * v.mean() for k, v in losses.items())
        return total, losses, (deter.detach(), stoch.detach())

    def behaviour_losses(self, start, states):
        """`states` includes the start; returns actor loss, value loss and new EMA."""
        deter, stoch = (x.flatten(0, 1) for x in start)
        feats, actions = [], []
        for _ in range(states):
            feats.append(torch.cat([stoch, deter], -1))
            actions.append(self.act(self.actor(feats[-1].detach())))
            deter = self.cell(deter, stoch, actions[-1])
            stoch = self.draw(self.prior(deter))
        feat, action = torch.stack(feats), torch.stack(actions)  # (H, N, ...)
        _, reward = self.scalar(feat, "_wm.heads.reward.", "Reward")
        gamma = 0.997 * torch.sigmoid(self.cont(feat))
        _, value = self.scalar(feat, VALUE, "Value")
        ret, returns = value[-1], []
        for t in reversed(range(states - 1)):
            bootstrap = 0.05 * value[t + 1] + 0.95 * ret
            ret = reward[t + 1] + gamma[t + 1] * bootstrap
            returns.insert(0, ret)
        ret = torch.stack(returns)
        weight = [torch.ones_like(gamma[0])]
        for t in range(states - 2):
            weight.append(weight[-1] * gamma[t])
        weight = torch.stack(weight).detach()
        quantiles = torch.quantile(ret.detach().flatten(), torch.tensor([0.05, 0.95]))
        ema = 0.01 * quantiles + 0.99 * self.state["_task_behavior.ema_vals"].detach()
        scale = (ema[1] - ema[0]).clamp(min=1.0)
        fixed = feat.detach()
        logp, _ = self.logp_and_entropy(self.actor(fixed), action)
        _, entropy = self.logp_and_entropy(self.actor(feat), action)
        reinforce = logp[:-1] * (ret - value[:-1]).detach()
        objective = {
            "dynamics": (ret - value[:-1]) / scale,
            "reinforce": reinforce,
            "both": self.mix * ret + (1 - self.mix) * reinforce,
        }[self.gradient]
        actor_loss = (-weight * objective - 3e-4 * entropy[:-1]).mean()
        logits, _ = self.scalar(fixed[:-1], VALUE, "Value")
        _, slow = self.scalar(fixed[:-1], SLOW, "Value")
        value_loss = -two_hot_logp(logits, ret) - two_hot_logp(logits, slow)
        return actor_loss, (weight * value_loss).mean(), ema

    # Update

    def update(self, batch, states):
        """Run one update; returns the losses by name."""
        total, losses, start = self.world_loss(batch)
        result = {name: float(loss.detach().mean()) for name, loss in losses.items()}
        self._step("model", MODEL, total, 1000.0, 1e-8, self.lrs[0])
        with torch.no_grad():
            for name, slow in self.state.items():
                if name.startswith(SLOW):
                    fast = self.state[VALUE + name[len(SLOW) :]]
                    slow.copy_(0.02 * fast + 0.98 * slow)
        actor, value, ema = self.behaviour_losses(start, states)
        result |= {"policy": float(actor.detach()), "value": float(value.detach())}
        gradients = [
            torch.autograd.grad(loss, self._tensors(prefix), retain_graph=True)
            for loss, prefix in ((actor, ACTOR), (value, VALUE))
        ]
        self._step("actor", ACTOR, None, 100.0, 1e-5, self.lrs[1], gradients[0])
        self._step("value", VALUE, None, 100.0, 1e-5, self.lrs[2], gradients[1])
        self.state["_task_behavior.ema_vals"] = ema
        return result

    def _tensors(self, prefix):
        return [v for k, v in self.state.items() if k.startswith(prefix)]

    def _step(self, kind, prefix, loss, clip, eps, lr, gradients=None):
        tensors = self._tensors(prefix)
        if gradients is None:
            gradients = torch.autograd.grad(loss, tensors)
        parameters = [torch.nn.Parameter(x.detach().clone()) for x in tensors]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_(parameters, clip)
        adam = torch.optim.Adam(parameters, lr, eps=eps)
        saved = next(v for k, v in self.optimizers.items() if f"_{kind}_opt" in k)
        for index, parameter in enumerate(parameters):
            adam.state[parameter] = {
                k: v.clone() for k, v in saved["state"][index].items()
            }
        adam.step()
        with torch.no_grad():
            names = [name for name in self.state if name.startswith(prefix)]
            for name, tensor, parameter in zip(names, tensors, parameters, strict=True):
                tensor.copy_(parameter)
                self.momentum[name] = adam.state[parameter]["exp_avg"]
