"""The networks of dreamerv3-torch, computed from its specification, for tests.

They use no class of Reverie. Tensors have the names of its checkpoints, and options
those of its `configs.yaml`. `shapes` are those of the observations, by key.
"""

from __future__ import annotations

import copy
import math
import re

import torch
import torch.nn.functional as F

MODEL, ACTOR, VALUE = "_wm.", "_task_behavior.actor.", "_task_behavior.value."
SLOW = "_task_behavior._slow_value."
DYN = "_wm.dynamics."
BINS = 255

CONV = {"mlp_keys": ".*", "cnn_keys": ".*", "act": "SiLU", "norm": True}
CONV |= {"cnn_depth": 4, "kernel_size": 4, "minres": 3, "mlp_layers": 2, "mlp_units": 8}
OPTIONS = {
    "size": [12, 12],
    "dyn_hidden": 8,
    "dyn_deter": 16,
    "dyn_stoch": 4,
    "dyn_discrete": 3,
    "dyn_mean_act": "none",
    "dyn_std_act": "sigmoid2",
    "dyn_min_std": 0.1,
    "units": 8,
    "act": "SiLU",
    "norm": True,
    "encoder": {**CONV, "symlog_inputs": True},
    "decoder": {
        **CONV,
        "cnn_sigmoid": False,
        "image_dist": "mse",
        "vector_dist": "symlog_mse",
    },
    "actor": {
        "layers": 2,
        "dist": "onehot",
        "unimix_ratio": 0.01,
        "std": "none",
        "min_std": 0.1,
        "max_std": 1.0,
    },
    "critic": {"layers": 2, "dist": "symlog_disc"},
    "reward_head": {"layers": 2, "dist": "symlog_disc"},
    "cont_head": {"layers": 2},
    "dyn_scale": 0.5,
    "rep_scale": 0.1,
    "kl_free": 1.0,
    "unimix_ratio": 0.01,
    "initial": "learned",
    "reward_EMA": True,
}


def make_options(**changes):
    """Return small sizes with changes; those of a group are a dict."""
    options = copy.deepcopy(OPTIONS)
    for name, value in changes.items():
        if isinstance(value, dict):
            options[name].update(value)
        else:
            options[name] = value
    return options


def select_keys(shapes, group):
    """Return the keys of images and vectors of the encoder or decoder."""
    images, vectors = (
        [k for k in sorted(shapes) if len(shapes[k]) == rank and re.match(pattern, k)]
        for rank, pattern in ((3, group["cnn_keys"]), (1, group["mlp_keys"]))
    )
    return images, vectors


def count_stages(options, group):
    return int(math.log2(options["size"][0]) - math.log2(group["minres"]))


def make_state(options, shapes, actions, seed=0):
    """Random tensors of an agent with `actions` outputs of the actor."""
    g = torch.Generator().manual_seed(seed)
    state: dict[str, torch.Tensor] = {}

    def add(name, *shape):
        scale = 1 / math.sqrt(math.prod(shape[1:]))
        state[name] = scale * torch.randn(shape, generator=g)

    def norm(name, width, on):
        if on:
            state[f"{name}.weight"] = 1 + 0.1 * torch.randn(width, generator=g)
            state[f"{name}.bias"] = 0.1 * torch.randn(width, generator=g)

    def output(name, inputs, width):
        add(f"{name}.weight", width, inputs)
        add(f"{name}.bias", width)

    def mlp(name, inputs, layers, units, on):
        for i in range(layers):
            add(f"{name}_linear{i}.weight", units, units if i else inputs)
            norm(f"{name}_norm{i}", units, on)
        return units

    deter, hidden = options["dyn_deter"], options["dyn_hidden"]
    flat = options["dyn_stoch"] * (options["dyn_discrete"] or 1)
    feat = flat + deter
    enc, dec, has_norm = options["encoder"], options["decoder"], options["norm"]
    images, vectors = select_keys(shapes, enc)
    embed, stages = 0, count_stages(options, enc)
    depth, kernel, step = enc["cnn_depth"], enc["kernel_size"], 2 + enc["norm"]
    if images:
        channels, side = sum(shapes[k][2] for k in images), options["size"][0]
        for i in range(stages):
            cnn = "_wm.encoder._cnn.layers"
            add(f"{cnn}.{step * i}.weight", depth * 2**i, channels, kernel, kernel)
            norm(f"{cnn}.{step * i + 1}.norm", depth * 2**i, enc["norm"])
            channels, side = depth * 2**i, math.ceil(side / 2)
        embed += channels * side * side
    sizes = (enc["mlp_layers"], enc["mlp_units"], enc["norm"])
    if vectors:
        width = sum(shapes[key][0] for key in vectors)
        embed += mlp("_wm.encoder._mlp.layers.Encoder", width, *sizes)
    if options["initial"] == "learned":
        add(f"{DYN}W", 1, deter)
    for name, width, inputs in (
        ("_img_in_layers", hidden, flat + actions),
        ("_cell.layers.GRU", 3 * deter, hidden + deter),
        ("_img_out_layers", hidden, deter),
        ("_obs_out_layers", hidden, deter + embed),
    ):
        ends = ("_linear", "_norm") if name.endswith("GRU") else (".0", ".1")
        add(f"{DYN}{name}{ends[0]}.weight", width, inputs)
        norm(f"{DYN}{name}{ends[1]}", width, has_norm)
    for name in ("_imgs_stat_layer", "_obs_stat_layer"):
        output(f"{DYN}{name}", hidden, flat if options["dyn_discrete"] else 2 * flat)
    images, vectors = select_keys(shapes, dec)
    depth, kernel, step = dec["cnn_depth"], dec["kernel_size"], 2 + dec["norm"]
    stages = count_stages(options, dec)
    if images:
        cnn, channels = "_wm.heads.decoder._cnn", depth * 2 ** (stages - 1)
        output(f"{cnn}._linear_layer", feat, dec["minres"] ** 2 * channels)
        for i in range(stages):
            is_last = i == stages - 1
            out = sum(shapes[k][2] for k in images) if is_last else channels // 2
            add(f"{cnn}.layers.{step * i}.weight", channels, out, kernel, kernel)
            if is_last:
                add(f"{cnn}.layers.{step * i}.bias", out)
            else:
                norm(f"{cnn}.layers.{step * i + 1}.norm", out, dec["norm"])
            channels = out
    sizes = (dec["mlp_layers"], dec["mlp_units"], dec["norm"])
    if vectors:
        mlp("_wm.heads.decoder._mlp.layers.Decoder", feat, *sizes)
        for key in vectors:
            name = f"_wm.heads.decoder._mlp.mean_layer.{key}"
            output(name, dec["mlp_units"], shapes[key][0])
    critic = BINS if options["critic"]["dist"] == "symlog_disc" else 1
    for prefix, label, width, group in (
        ("_wm.heads.reward.", "Reward", BINS, "reward_head"),
        ("_wm.heads.cont.", "Cont", 1, "cont_head"),
        (ACTOR, "Actor", actions, "actor"),
        (VALUE, "Value", critic, "critic"),
        (SLOW, "Value", critic, "critic"),
    ):
        sizes = (options[group]["layers"], options["units"], has_norm)
        mlp(f"{prefix}layers.{label}", feat, *sizes)
        output(f"{prefix}mean_layer", options["units"], width)
        if prefix == ACTOR and options["actor"]["std"] == "learned":
            output(f"{prefix}std_layer", options["units"], width)
    if options["reward_EMA"]:
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


def symlog(x):
    return torch.sign(x) * torch.log(torch.abs(x) + 1)


def symexp(x):
    return torch.sign(x) * (torch.exp(torch.abs(x)) - 1)


def two_hot_logp(logits, target):
    bins, z = torch.linspace(-20, 20, BINS), symlog(target.detach())[..., None]
    below = (bins <= z).sum(-1) - 1
    above = BINS - (bins > z).sum(-1)
    below, above = below.clamp(0, BINS - 1), above.clamp(0, BINS - 1)
    z, same = z[..., 0], below == above
    to_below = torch.where(same, 1.0, (bins[below] - z).abs())
    to_above = torch.where(same, 1.0, (bins[above] - z).abs())
    share = to_above / (to_below + to_above)
    weights = F.one_hot(below, BINS) * share[..., None]
    weights = weights + F.one_hot(above, BINS) * (1 - share)[..., None]
    return (weights * torch.log_softmax(logits, -1)).sum(-1)


def to_padding(side, kernel):
    """Padding before and after an axis, so that stride two halves its size."""
    total = max((math.ceil(side / 2) - 1) * 2 + kernel - side, 0)
    return total // 2, total - total // 2


class Networks:
    """Outputs of all networks for the tensors of a checkpoint.

    Random draws are the most likely class, or the mean plus `noise` deviations.
    """

    def __init__(self, state, options, shapes, noise=0.0):
        self.state, self.options = state, options
        self.shapes, self.noise = shapes, noise
        self.classes = options["dyn_discrete"]
        self.discrete = options["actor"]["dist"] == "onehot"

    # Layers

    def norm(self, x, name):
        if f"{name}.weight" not in self.state:
            return x
        mean, var = x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True)
        x = (x - mean) / torch.sqrt(var + 1e-3)
        return x * self.state[f"{name}.weight"] + self.state[f"{name}.bias"]

    def layer(self, x, weight, norm, act):
        x = self.norm(x @ self.state[f"{weight}.weight"].T, norm)
        return x if act is None else getattr(torch.nn, act)()(x)

    def mlp(self, x, name, act):
        i = 0
        while f"{name}_linear{i}.weight" in self.state:
            x = self.layer(x, f"{name}_linear{i}", f"{name}_norm{i}", act)
            i += 1
        return x

    def out(self, x, name):
        return x @ self.state[f"{name}.weight"].T + self.state[f"{name}.bias"]

    def conv_act(self, x, name, act):
        """Norm over the channels and activation of images (b, c, h, w)."""
        x = self.norm(x.permute(0, 2, 3, 1), name).permute(0, 3, 1, 2)
        return getattr(torch.nn, act)()(x)

    # Encoder

    def scale_image(self, key, image):
        return image.float() / 255 if key == "image" else image.float()

    def encode(self, obs):
        group, parts = self.options["encoder"], []
        images, vectors = select_keys(self.shapes, group)
        if images:
            x = torch.cat([self.scale_image(k, obs[k]) for k in images], -1) - 0.5
            batch = x.shape[:-3]
            x = x.flatten(0, -4).permute(0, 3, 1, 2)
            for i in range(count_stages(self.options, group)):
                name, step = "_wm.encoder._cnn.layers", 2 + group["norm"]
                weight = self.state[f"{name}.{step * i}.weight"]
                rows, columns = (to_padding(n, weight.shape[-1]) for n in x.shape[2:])
                x = F.conv2d(F.pad(x, (*columns, *rows)), weight, None, 2)
                x = self.conv_act(x, f"{name}.{step * i + 1}.norm", group["act"])
            parts.append(x.flatten(1).reshape(*batch, -1))
        if vectors:
            y = torch.cat([obs[key].float() for key in vectors], -1)
            y = symlog(y) if group["symlog_inputs"] else y
            parts.append(self.mlp(y, "_wm.encoder._mlp.layers.Encoder", group["act"]))
        return torch.cat(parts, -1)

    # Dynamics

    def statistics(self, x, layer, name):
        """Logits, or mean and standard deviation."""
        x = self.layer(x, f"{DYN}{layer}.0", f"{DYN}{layer}.1", self.options["act"])
        x = self.out(x, f"{DYN}{name}")
        if self.classes:
            return (x.reshape(*x.shape[:-1], -1, self.classes),)
        mean, std = x.chunk(2, -1)
        if self.options["dyn_mean_act"] == "tanh5":
            mean = 5 * torch.tanh(mean / 5)
        std = {
            "sigmoid2": lambda: 2 * torch.sigmoid(std / 2),
            "sigmoid": lambda: torch.sigmoid(std),
            "abs": lambda: torch.abs(std + 1),
        }[self.options["dyn_std_act"]]()
        return mean, std + self.options["dyn_min_std"]

    def probs(self, logits):
        ratio = self.options["unimix_ratio"]
        return (1 - ratio) * torch.softmax(logits, -1) + ratio / logits.shape[-1]

    def draw(self, stats):
        if not self.classes:
            return stats[0] + self.noise * stats[1]
        p = self.probs(stats[0])
        onehot = F.one_hot(p.argmax(-1), self.classes).float()
        return (onehot + (p - p.detach())).flatten(-2)

    def prior(self, deter):
        return self.statistics(deter, "_img_out_layers", "_imgs_stat_layer")

    def posterior(self, deter, embed):
        inputs = torch.cat([deter, embed], -1)
        return self.statistics(inputs, "_obs_out_layers", "_obs_stat_layer")

    def initial(self, count):
        if self.options["initial"] == "zeros":
            flat = self.options["dyn_stoch"] * (self.classes or 1)
            return torch.zeros(count, self.options["dyn_deter"]), torch.zeros(
                count, flat
            )
        deter = torch.tanh(self.state[f"{DYN}W"])
        stats = self.prior(deter)
        stoch = stats[0]
        if self.classes:
            log = torch.log(self.probs(stats[0]))
            onehot = F.one_hot(log.argmax(-1), self.classes).float()
            stoch = (onehot + (log - log.detach())).flatten(-2)
        return deter.expand(count, -1), stoch.expand(count, -1)

    def cell(self, deter, stoch, action):
        x = torch.cat([stoch, action], -1)
        act = self.options["act"]
        x = self.layer(x, f"{DYN}_img_in_layers.0", f"{DYN}_img_in_layers.1", act)
        x, gru = torch.cat([x, deter], -1), f"{DYN}_cell.layers.GRU"
        gates = self.layer(x, f"{gru}_linear", f"{gru}_norm", None)
        r, c, u = gates.chunk(3, -1)
        c = torch.tanh(torch.sigmoid(r) * c)
        u = torch.sigmoid(u - 1)
        return u * c + (1 - u) * deter

    def observe(self, embed, action, is_first):
        """Return deter, stoch and the statistics of the posterior (B, T, ...).

        `action` led to its row.
        """
        start = self.initial(len(embed))
        deter, stoch = start
        deters, stochs, posts = [], [], []
        for t in range(embed.shape[1]):
            first = is_first[:, t, None]
            deter = torch.where(first, start[0], deter)
            stoch = torch.where(first, start[1], stoch)
            deter = self.cell(deter, stoch, torch.where(first, 0.0, action[:, t]))
            posts.append(self.posterior(deter, embed[:, t]))
            stoch = self.draw(posts[-1])
            deters.append(deter)
            stochs.append(stoch)
        post = [torch.stack(x, 1) for x in zip(*posts, strict=True)]
        return torch.stack(deters, 1), torch.stack(stochs, 1), post

    def kl(self, one, two):
        if self.classes:
            p, q = self.probs(one[0]), self.probs(two[0])
            return (p * (torch.log(p) - torch.log(q))).sum((-2, -1))
        normals = [torch.distributions.Normal(*x) for x in (one, two)]
        return torch.distributions.kl_divergence(*normals).sum(-1)

    # Heads

    def decode(self, feat):
        """Return images in the encoder's scale, and symlog of vectors, by key."""
        group = self.options["decoder"]
        images, vectors = select_keys(self.shapes, group)
        found = {}
        if images:
            cnn, side = "_wm.heads.decoder._cnn", group["minres"]
            x = self.out(feat.flatten(0, -2), f"{cnn}._linear_layer")
            x = x.reshape(len(x), side, side, -1).permute(0, 3, 1, 2)
            excess = group["kernel_size"] - 2
            pad = math.ceil(excess / 2)
            for i in range(count_stages(self.options, group)):
                name, step = f"{cnn}.layers", 2 + group["norm"]
                weight = self.state[f"{name}.{step * i}.weight"]
                bias = self.state.get(f"{name}.{step * i}.bias")
                x = F.conv_transpose2d(x, weight, bias, 2, pad, 2 * pad - excess)
                if bias is None:
                    x = self.conv_act(x, f"{name}.{step * i + 1}.norm", group["act"])
            x = x.permute(0, 2, 3, 1)
            x = torch.sigmoid(x) if group["cnn_sigmoid"] else x + 0.5
            x = x.reshape(*feat.shape[:-1], *x.shape[1:])
            sizes = [self.shapes[key][2] for key in images]
            found |= dict(zip(images, x.split(sizes, -1), strict=True))
        if vectors:
            mlp = "_wm.heads.decoder._mlp."
            y = self.mlp(feat, f"{mlp}layers.Decoder", group["act"])
            found |= {key: self.out(y, f"{mlp}mean_layer.{key}") for key in vectors}
        return found

    def decoder_logp(self, key, output, target):
        if len(self.shapes[key]) == 1:
            error = (output - symlog(target)) ** 2
            return -torch.where(error < 1e-8, 0.0, error).sum(-1)
        error = (output - self.scale_image(key, target)) ** 2
        if self.options["decoder"]["image_dist"] == "normal":
            error = 0.5 * (error + math.log(2 * math.pi))
        return -error.sum((-3, -2, -1))

    def head(self, feat, prefix, label):
        x = self.mlp(feat, f"{prefix}layers.{label}", self.options["act"])
        return self.out(x, f"{prefix}mean_layer")

    def scalar(self, feat, prefix, label):
        """Return the outputs of a head and the number that it predicts."""
        x = self.head(feat, prefix, label)
        if x.shape[-1] == 1:
            return x, symexp(x[..., 0])
        return x, symexp((torch.softmax(x, -1) * torch.linspace(-20, 20, BINS)).sum(-1))

    def cont(self, feat):
        return self.head(feat, "_wm.heads.cont.", "Cont")[..., 0]

    def actor(self, feat):
        """Return probabilities, or mean and standard deviation."""
        group = self.options["actor"]
        x = self.mlp(feat, f"{ACTOR}layers.Actor", self.options["act"])
        mean = self.out(x, f"{ACTOR}mean_layer")
        if self.discrete:
            ratio = group["unimix_ratio"]
            return ((1 - ratio) * torch.softmax(mean, -1) + ratio / mean.shape[-1],)
        if group["std"] == "learned":
            std = self.out(x, f"{ACTOR}std_layer")
        else:
            std = torch.full_like(mean, float(group["std"]))
        low, high = group["min_std"], group["max_std"]
        if group["dist"] == "normal_std_fixed":
            return mean, std
        if group["dist"] == "trunc_normal":
            return torch.tanh(mean), 2 * torch.sigmoid(std / 2) + low
        return torch.tanh(mean), (high - low) * torch.sigmoid(std + 2) + low
