"""An independent computation of one update of dreamerv3-torch, for tests.

Tensors have the names of its checkpoints. Random draws are replaced by the most likely
class, or by the mean plus half a standard deviation.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from reverie.nets.rng import Rng

DRAW = 0.5
"""Normal noise of all draws."""
MODEL, ACTOR, VALUE = "_wm.", "_task_behavior.actor.", "_task_behavior.value."
SLOW = "_task_behavior._slow_value."


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


def make_state(
    actions, discrete, image=12, channels=1, vector=3, key="vector", classes=3, seed=0
):
    """Random tensors of an agent for an image and a vector `key`, if it has a size."""
    deter, hidden, stoch = 16, 8, 4
    depth, units, layers = 4, 8, 2
    g = torch.Generator().manual_seed(seed)
    state: dict[str, torch.Tensor] = {}

    def add(name, *shape):
        scale = 1 / math.sqrt(math.prod(shape[1:]) or 1)
        state[name] = scale * torch.randn(shape, generator=g)

    def norm(name, width):
        state[f"{name}.weight"] = 1 + 0.1 * torch.randn(width, generator=g)
        state[f"{name}.bias"] = 0.1 * torch.randn(width, generator=g)

    def output(name, inputs, width):
        add(f"{name}.weight", width, inputs)
        add(f"{name}.bias", width)

    def mlp(prefix, label, inputs):
        for i in range(layers):
            add(
                f"{prefix}layers.{label}_linear{i}.weight",
                units,
                units if i else inputs,
            )
            norm(f"{prefix}layers.{label}_norm{i}", units)

    flat = stoch * (classes or 1)
    feat = flat + deter
    smallest = image // 4
    cnn = "_wm.encoder._cnn.layers"
    add(f"{cnn}.0.weight", depth, channels, 4, 4)
    norm(f"{cnn}.1.norm", depth)
    add(f"{cnn}.3.weight", 2 * depth, depth, 4, 4)
    norm(f"{cnn}.4.norm", 2 * depth)
    if vector:
        mlp("_wm.encoder._mlp.", "Encoder", vector)
    embed = smallest * smallest * 2 * depth + (units if vector else 0)
    dyn = "_wm.dynamics."
    add(f"{dyn}W", 1, deter)
    add(f"{dyn}_img_in_layers.0.weight", hidden, flat + actions)
    norm(f"{dyn}_img_in_layers.1", hidden)
    add(f"{dyn}_cell.layers.GRU_linear.weight", 3 * deter, hidden + deter)
    norm(f"{dyn}_cell.layers.GRU_norm", 3 * deter)
    add(f"{dyn}_img_out_layers.0.weight", hidden, deter)
    norm(f"{dyn}_img_out_layers.1", hidden)
    add(f"{dyn}_obs_out_layers.0.weight", hidden, deter + embed)
    norm(f"{dyn}_obs_out_layers.1", hidden)
    for name in ("_imgs_stat_layer", "_obs_stat_layer"):
        output(f"{dyn}{name}", hidden, flat if classes else 2 * stoch)
    cnn = "_wm.heads.decoder._cnn"
    output(f"{cnn}._linear_layer", feat, smallest * smallest * 2 * depth)
    add(f"{cnn}.layers.0.weight", 2 * depth, depth, 4, 4)
    norm(f"{cnn}.layers.1.norm", depth)
    add(f"{cnn}.layers.3.weight", depth, channels, 4, 4)
    add(f"{cnn}.layers.3.bias", channels)
    if vector:
        mlp("_wm.heads.decoder._mlp.", "Decoder", feat)
        output(f"_wm.heads.decoder._mlp.mean_layer.{key}", units, vector)
    for prefix, label, width in (
        ("_wm.heads.reward.", "Reward", 255),
        ("_wm.heads.cont.", "Cont", 1),
        (ACTOR, "Actor", actions),
        (VALUE, "Value", 255),
        (SLOW, "Value", 255),
    ):
        mlp(prefix, label, feat)
        output(f"{prefix}mean_layer", units, width)
        if prefix == ACTOR and not discrete:
            output(f"{prefix}std_layer", units, width)
    state["_task_behavior.ema_vals"] = torch.tensor([-0.3, 1.9])
    return state


def with_copies(state, compiled: bool = False):
    """All names that a checkpoint has, as the modules of the original share parts."""
    everything = dict(state)
    for name, value in state.items():
        if name.startswith(MODEL):
            everything["_task_behavior._world_model." + name[len(MODEL) :]] = value
    for name, value in list(everything.items()):
        if name.startswith("_task_behavior."):
            everything["_expl_behavior." + name.split(".", 1)[1]] = value
    if not compiled:
        return everything
    return {k.replace(".", "._orig_mod.", 1): v for k, v in everything.items()}


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


def symlog(x):
    return torch.sign(x) * torch.log(torch.abs(x) + 1)


def symexp(x):
    return torch.sign(x) * (torch.exp(torch.abs(x)) - 1)


class Reference:
    """One update with the state of a checkpoint."""

    def __init__(self, state, optimizers, *, classes, discrete, gradient, mix, lrs):
        self.state = {k: v.clone().requires_grad_() for k, v in state.items()}
        self.optimizers, self.lrs = optimizers, lrs
        self.classes, self.discrete = classes, discrete
        self.gradient, self.mix = gradient, mix
        self.momentum = {}

    # Networks

    def layer(self, x, weight, norm, act=F.silu):
        s = self.state
        y = x @ s[f"{weight}.weight"].T
        mean, var = y.mean(-1, keepdim=True), y.var(-1, correction=0, keepdim=True)
        y = (y - mean) / torch.sqrt(var + 1e-3)
        y = y * s[f"{norm}.weight"] + s[f"{norm}.bias"]
        return act(y)

    def mlp(self, x, prefix, label):
        i = 0
        while f"{prefix}layers.{label}_linear{i}.weight" in self.state:
            name = f"{prefix}layers.{label}"
            x = self.layer(x, f"{name}_linear{i}", f"{name}_norm{i}")
            i += 1
        return x

    def out(self, x, name):
        return x @ self.state[f"{name}.weight"].T + self.state[f"{name}.bias"]

    def channel_norm(self, x, name):
        mean, var = x.mean(1, keepdim=True), x.var(1, correction=0, keepdim=True)
        scale, shift = self.state[f"{name}.weight"], self.state[f"{name}.bias"]
        y = (x - mean) / torch.sqrt(var + 1e-3)
        return F.silu(y * scale[:, None, None] + shift[:, None, None])

    def encode(self, image, vector):
        x = image.flatten(0, 1).permute(0, 3, 1, 2) / 255 - 0.5
        cnn = "_wm.encoder._cnn.layers"
        for conv, norm in ((0, 1), (3, 4)):
            x = F.conv2d(
                F.pad(x, (1, 1, 1, 1)), self.state[f"{cnn}.{conv}.weight"], None, 2
            )
            x = self.channel_norm(x, f"{cnn}.{norm}.norm")
        y = self.mlp(symlog(vector), "_wm.encoder._mlp.", "Encoder")
        return torch.cat([x.flatten(1).reshape(*image.shape[:2], -1), y], -1)

    def statistics(self, x, layer, name):
        x = self.layer(x, f"_wm.dynamics.{layer}.0", f"_wm.dynamics.{layer}.1")
        x = self.out(x, f"_wm.dynamics.{name}")
        if not self.classes:
            mean, std = x.chunk(2, -1)
            return mean, 2 * torch.sigmoid(std / 2) + 0.1
        logits = x.reshape(*x.shape[:-1], -1, self.classes)
        return (0.99 * torch.softmax(logits, -1) + 0.01 / self.classes,)

    def draw(self, stats):
        if not self.classes:
            return stats[0] + DRAW * stats[1]
        (p,) = stats
        onehot = F.one_hot(p.argmax(-1), self.classes).float()
        return (onehot + (p - p.detach())).flatten(-2)

    def prior(self, deter):
        return self.statistics(deter, "_img_out_layers", "_imgs_stat_layer")

    def initial(self, count):
        deter = torch.tanh(self.state["_wm.dynamics.W"])
        stats = self.prior(deter)
        stoch = stats[0]
        if self.classes:
            log = torch.log(stats[0])
            onehot = F.one_hot(log.argmax(-1), self.classes).float()
            stoch = (onehot + (log - log.detach())).flatten(-2)
        return deter.expand(count, -1), stoch.expand(count, -1)

    def cell(self, deter, stoch, action):
        dyn = "_wm.dynamics."
        x = torch.cat([stoch, action], -1)
        x = self.layer(x, f"{dyn}_img_in_layers.0", f"{dyn}_img_in_layers.1")
        x = torch.cat([x, deter], -1)
        gru = f"{dyn}_cell.layers.GRU"
        gates = self.layer(x, f"{gru}_linear", f"{gru}_norm", lambda y: y)
        r, c, u = gates.chunk(3, -1)
        c = torch.tanh(torch.sigmoid(r) * c)
        u = torch.sigmoid(u - 1)
        return u * c + (1 - u) * deter

    def kl(self, one, two):
        if self.classes:
            return (one[0] * (torch.log(one[0]) - torch.log(two[0]))).sum((-2, -1))
        normals = [torch.distributions.Normal(*x) for x in (one, two)]
        return torch.distributions.kl_divergence(*normals).sum(-1)

    def two_hot_logp(self, logits, target):
        bins, z = torch.linspace(-20, 20, 255), symlog(target.detach())[..., None]
        below = (bins <= z).sum(-1) - 1
        above = 255 - (bins > z).sum(-1)
        below, above = below.clamp(0, 254), above.clamp(0, 254)
        z = z[..., 0]
        same = below == above
        to_below = torch.where(same, 1.0, (bins[below] - z).abs())
        to_above = torch.where(same, 1.0, (bins[above] - z).abs())
        weights = F.one_hot(below, 255) * (to_above / (to_below + to_above))[..., None]
        weights = (
            weights
            + F.one_hot(above, 255) * ((to_below / (to_below + to_above))[..., None])
        )
        return (weights * torch.log_softmax(logits, -1)).sum(-1)

    def scalar(self, feat, prefix, label):
        logits = self.out(self.mlp(feat, prefix, label), f"{prefix}mean_layer")
        mode = symexp(
            (torch.softmax(logits, -1) * torch.linspace(-20, 20, 255)).sum(-1)
        )
        return logits, mode

    def cont(self, feat):
        prefix = "_wm.heads.cont."
        return self.out(self.mlp(feat, prefix, "Cont"), f"{prefix}mean_layer")[..., 0]

    def actor(self, feat):
        x = self.mlp(feat, ACTOR, "Actor")
        mean = self.out(x, f"{ACTOR}mean_layer")
        if self.discrete:
            return (0.99 * torch.softmax(mean, -1) + 0.01 / mean.shape[-1],)
        std = self.out(x, f"{ACTOR}std_layer")
        return torch.tanh(mean), 0.9 * torch.sigmoid(std + 2) + 0.1

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
        """`batch` has image, vector, action (that led to the row), reward and flags."""
        embed = self.encode(batch["image"], batch["vector"])
        start = self.initial(len(embed))
        deter, stoch = start
        deters, stochs, posts = [], [], []
        for t in range(embed.shape[1]):
            first = batch["is_first"][:, t, None]
            deter = torch.where(first, start[0], deter)
            stoch = torch.where(first, start[1], stoch)
            action = torch.where(first, 0.0, batch["action"][:, t])
            deter = self.cell(deter, stoch, action)
            inputs = torch.cat([deter, embed[:, t]], -1)
            posts.append(self.statistics(inputs, "_obs_out_layers", "_obs_stat_layer"))
            stoch = self.draw(posts[-1])
            deters.append(deter)
            stochs.append(stoch)
        deter, stoch = torch.stack(deters, 1), torch.stack(stochs, 1)
        post = [torch.stack(x, 1) for x in zip(*posts, strict=True)]
        prior, feat = self.prior(deter), torch.cat([stoch, deter], -1)
        losses = self.reconstruction(feat, batch)
        reward, _ = self.scalar(feat, "_wm.heads.reward.", "Reward")
        losses["rew"] = -self.two_hot_logp(reward, batch["reward"])
        cont, target = self.cont(feat), 1 - batch["is_terminal"].float()
        losses["con"] = -(
            target * F.logsigmoid(cont) + (1 - target) * F.logsigmoid(-cont)
        )
        fixed_post, fixed_prior = ([x.detach() for x in y] for y in (post, prior))
        losses["dyn"] = self.kl(fixed_post, prior).clamp(min=1.0)
        losses["rep"] = self.kl(post, fixed_prior).clamp(min=1.0)
        scales = {"dyn": 0.5, "rep": 0.1}
        total = sum(scales.get(k, 1.0) * v.mean() for k, v in losses.items())
        return total, losses, (deter.detach(), stoch.detach())

    def reconstruction(self, feat, batch):
        cnn = "_wm.heads.decoder._cnn"
        x = self.out(feat.flatten(0, 1), f"{cnn}._linear_layer")
        side = batch["image"].shape[2] // 4
        x = x.reshape(len(x), side, side, -1).permute(0, 3, 1, 2)
        x = F.conv_transpose2d(x, self.state[f"{cnn}.layers.0.weight"], None, 2, 1)
        x = self.channel_norm(x, f"{cnn}.layers.1.norm")
        last = [self.state[f"{cnn}.layers.3.{leaf}"] for leaf in ("weight", "bias")]
        x = F.conv_transpose2d(x, *last, 2, 1).permute(0, 2, 3, 1) + 0.5
        image = x.reshape(batch["image"].shape) - batch["image"] / 255
        mlp = "_wm.heads.decoder._mlp."
        vector = self.out(self.mlp(feat, mlp, "Decoder"), f"{mlp}mean_layer.vector")
        error = (vector - symlog(batch["vector"])) ** 2
        error = torch.where(error < 1e-8, 0.0, error)
        return {"image": (image**2).sum((-3, -2, -1)), "vector": error.sum(-1)}

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
        value_loss = -self.two_hot_logp(logits, ret) - self.two_hot_logp(logits, slow)
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
