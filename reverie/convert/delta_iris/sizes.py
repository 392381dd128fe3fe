"""Infer the settings of a checkpoint of Δ-IRIS from the shapes of its tensors.

Sizes can be inferred, except for the number of attention heads: unless the user sets
it, it is known only for the two transformers in the configs of the original.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from reverie.api import UserError
from reverie.convert.importer import Settings, select_prefix

HEADS = "iris.world_model.transformer.heads"
KNOWN_HEADS = {512: 8, 256: 4}
"""Attention heads by the width of the transformer: for Crafter, for Atari."""
BURN_IN = 5
"""Burn-in of the actor-critic in the configs of the original, in steps."""
TWO_HOT = 255
"""Outputs of a head with two-hot targets."""

Shapes = dict[str, tuple[int, ...]]


def infer_settings(
    tensors: Mapping[str, Tensor], given: Settings
) -> dict[str, Settings]:
    """Return the settings that the shapes determine, by component.

    `given` has the number of attention heads, if the user has set it.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    tokenizer = _tokenizer_settings(select_prefix(shapes, "tokenizer."))
    world_model = select_prefix(shapes, "world_model.")
    parts = {
        "tokenizer": tokenizer,
        "world_model": _world_settings(world_model, tokenizer.get("tokens"), given),
        "actor_critic": _actor_critic_settings(
            select_prefix(shapes, "actor_critic.model.")
        ),
    }
    return {
        part: {f"iris.{part}.{name}": value for name, value in settings.items()}
        for part, settings in parts.items()
        if settings
    }


def infer_training(tensors: Mapping[str, Tensor]) -> Settings:
    """Return training lengths that fit the context of the transformer.

    In the configs of the original, sequences and imagined rollouts fill the context.
    """
    # any number of heads, because it does not affect the context
    world = infer_settings(tensors, {HEADS: 1}).get("world_model", {})
    blocks = world.get("iris.world_model.transformer.blocks")
    if blocks is None:
        return {}
    burn_in = max(0, min(BURN_IN, blocks - 2))
    return {
        "iris.training.world_model.length": blocks,
        "iris.actor_critic.burn_in": burn_in,
        "iris.actor_critic.horizon": max(1, blocks - burn_in - 1),
    }


def _tokenizer_settings(shapes: Shapes) -> Settings:
    names = ("encoder_act_emb.weight", "quantizer.pre_quant_proj.weight")
    if any(name not in shapes for name in names):
        return {}  # loading the weights raises an error
    # the embedding of an action has one entry per pixel; the quantizer projects
    # `token_inputs` entries of the encoder's output to one token
    pixels, (_, token_inputs) = shapes[names[0]][1], shapes[names[1]]
    encoder = _frame_settings(shapes, "encoder.encoder.")
    frame = _frame_settings(shapes, "frame_cnn.encoder.")
    area = pixels // 4 ** sum(encoder["halve"])  # of the smallest feature map
    inputs = shapes["decoder.decoder.0.weight"][1]
    return {
        "tokens": encoder["latent"] * area // token_inputs,
        "action_planes": inputs - encoder["latent"] - frame["latent"],
        **_with_group("encoder", encoder),
        **_with_group("frame", frame),
        **_with_group("decoder", _decoder_settings(shapes, "decoder.decoder.")),
        "quantizer.codes": shapes["quantizer.codebook"][0],
        "quantizer.width": shapes["quantizer.codebook"][1],
    }


def _world_settings(shapes: Shapes, tokens: int | None, given: Settings) -> Settings:
    if "transformer.pos_emb.weight" not in shapes or tokens is None:
        return {}
    positions, width = shapes["transformer.pos_emb.weight"]
    layers = {name.split(".")[2] for name in shapes if ".blocks." in name}
    heads = given.get(HEADS) or KNOWN_HEADS.get(width)
    if heads is None:
        raise UserError(
            f"The transformer of the checkpoint has width {width}; the number of its "
            "attention heads is not in the file.\n  Fix: set num_heads of its config, "
            f"for example --{HEADS} {max(1, width // 64)}"
        )
    return {
        "transformer.layers": len(layers),
        "transformer.heads": heads,
        "transformer.width": width,
        # a block has the tokens of a transition, its action and its frame
        "transformer.blocks": positions // (tokens + 2),
        **_with_group("frame", _frame_settings(shapes, "frame_cnn.0.encoder.")),
        "two_hot_rewards": shapes["head_rewards.head_module.2.bias"][0] == TWO_HOT,
    }


def _actor_critic_settings(shapes: Shapes) -> Settings:
    if "lstm.weight_hh" not in shapes:
        return {}
    return {
        "width": shapes["lstm.weight_hh"][1],
        **_with_group("frame", _frame_settings(shapes, "cnn.0.encoder.")),
        "two_hot_values": shapes["critic_linear.bias"][0] == TWO_HOT,
    }


def _frame_settings(shapes: Shapes, net: str) -> Settings:
    """Return the settings of a convolutional encoder.

    Its layers are a convolution, residual blocks (`f`), each followed by downsampling
    (`conv`) or not, a norm and a convolution.
    """
    layers = select_prefix(shapes, net)
    channels, units, halve = layers["0.weight"][0], [], []
    for index in range(1, _last_index(layers)):
        if f"{index}.f.2.weight" in layers:
            units.append(layers[f"{index}.f.2.weight"][0])
            halve.append(0)
        elif f"{index}.conv.weight" in layers:
            halve[-1] = 1
    return {
        "channels": channels,
        "latent": layers[f"{_last_index(layers)}.weight"][0],
        "mults": tuple(count // channels for count in units),
        "halve": tuple(halve),
    }


def _decoder_settings(shapes: Shapes, net: str) -> Settings:
    """Return the settings of a decoder, the mirror image of an encoder."""
    layers = select_prefix(shapes, net)
    channels, units, halve = layers[f"{_last_index(layers)}.weight"][1], [], []
    upsampled = 0  # 1 after an upsampling layer, which precedes its residual block
    for index in range(1, _last_index(layers)):
        if f"{index}.f.2.weight" in layers:
            units.append(layers[f"{index}.f.2.weight"][1])
            halve.append(upsampled)
            upsampled = 0
        elif f"{index}.conv.weight" in layers:
            upsampled = 1
    return {
        "channels": channels,
        "mults": tuple(count // channels for count in reversed(units)),
        "halve": tuple(reversed(halve)),
    }


def _last_index(layers: Shapes) -> int:
    return max(int(name.split(".")[0]) for name in layers)


def _with_group(name: str, settings: Settings) -> Settings:
    return {f"{name}.{key}": value for key, value in settings.items()}
