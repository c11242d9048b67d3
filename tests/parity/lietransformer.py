"""Compare a golden file of LieTransformer or LieConv with the layers and models of the library.

Pairs in the files are coordinates of g_j⁻¹ g_i, where i is the receiver. Layers accept any coordinates of a graph, so
the pairs of the file are passed unchanged; the coordinates that the library computes from positions and frames are
checked by the kinds ``lift`` and ``model``. In these files lifted elements have separate neighbors, so here they are
points with a fiber of 1. For the kind ``attention``, padded receivers are points to which no point attends. For other
kinds they are left out, since no valid point depends on them.
"""

import copy
import re

import numpy as np
import torch
from torch_geometric.data import Data

from lieattn.geometry import AllPairs, FiniteFrames, GivenFrames, point_clouds
from lieattn.groups import cyclic
from lieattn.models import AttentionOptions, FiniteSE2Transformer, HamiltonianDynamics, LieTransformer, Lifting, Readout
from lieattn.models.published import PublishedCoordinates, published_kernel
from lieattn.nn import LieBlock, LieBottleneck, LieConvolution, LieSelfAttention
from tests.parity import files
from tests.parity.lietransformer_files import (
    Padded,
    attention_parameters,
    block_parameters,
    compare,
    compare_stored,
    linear,
    load,
    norm_parameters,
    read,
    tensor,
)
from tests.parity.lietransformer_geometry import (
    ANGLES,
    COORDINATES,
    check_explog,
    check_lift,
    check_pairs,
    check_subsampling,
    frames_of,
    positions,
    space_of,
)


def check(path):
    arrays, meta = read(path)
    kind = meta.get("kind")
    if kind not in KINDS:
        raise AssertionError(f"{path.name}: unknown kind {kind!r}; known are {sorted(KINDS)}")
    KINDS[kind](arrays, meta)


def attention_layer(arrays, meta, prefix=""):
    channels = len(arrays[prefix + "value_b"])
    options = published_kernel(meta["kernel"], attention_fn=meta["normalisation"])
    layer = LieSelfAttention(
        channels,
        arrays["pair"].shape[-1],
        heads=meta["heads"],
        activation=meta["activation"],
        **_widths(arrays, meta, prefix),
        **options,
    ).double()
    return load(layer, attention_parameters(arrays, prefix))


def _widths(arrays, meta, prefix):
    widths = {}
    for name in ("loc_mlp_b1", "comb_mlp_b1"):
        if prefix + name in arrays:
            widths["hidden"] = arrays[prefix + name].shape[1]
    if prefix + "pair_b" in arrays:
        widths["feature_channels"] = len(arrays[prefix + "pair_b"])
    elif prefix + "receiver_b" in arrays:
        widths["feature_channels"] = 2 * len(arrays[prefix + "receiver_b"]) // meta["heads"]
    return widths


def check_attention(arrays, meta):
    for dtype in (torch.float64, torch.float32):
        _check_attention(arrays, meta, dtype)


def _check_attention(arrays, meta, dtype):
    mask, index = arrays["mask"], arrays.get("neighbour_index")
    # Padded points are at the origin, where some groups have no coordinates.
    seen = np.isfinite(arrays["pair"]).all(-1)
    if index is not None:
        seen |= ~_chosen(index, mask.shape[1])
    padded = Padded(mask | (seen | ~mask[:, None]).all(2))
    graph = padded.graph(arrays["pair"], index, keys=mask, dtype=dtype)
    layer = attention_layer(arrays, meta).to(dtype)
    graph.relative.coordinates.requires_grad_()
    x = padded.points(arrays["features"]).to(dtype)[:, None].requires_grad_()
    out = layer(x, graph)[:, 0]
    # A padded receiver may have only padded neighbors, and then its output is zero in the library.
    known = (graph.neighbors.degree > 0) | padded.points(mask)
    compare("out", out[known], padded.points(arrays["out"])[known], meta)
    weights = layer.weights(x, graph)[:, 0, 0]
    if "attention" in arrays:
        stored = padded.receivers(arrays["attention"])
        compare("attention", padded.dense(weights, graph.neighbors)[known], stored[known], meta)
    if "logits" in arrays:
        stored = arrays["logits"]
        if index is not None:
            stored = np.zeros((*arrays["pair"].shape[:3], meta["heads"]))
            np.put_along_axis(stored, index[..., None], arrays["logits"], axis=2)
        compare("logits", layer.scores(x, graph)[:, 0, 0], tensor(stored)[padded.edges_of(graph.neighbors)], meta)
    if names := files.gradients(arrays):
        (out * padded.points(arrays["cotangent"])).sum().backward()
        _check_gradients({name: arrays[f"grad_{name}"] for name in names}, meta, layer, padded, graph, x)


def _chosen(index, size):
    """Return whether j is a neighbor of i, [b, N, N]."""
    chosen = np.zeros((*index.shape[:2], size), bool)
    np.put_along_axis(chosen, index, True, axis=2)
    return chosen


def _check_gradients(stored, meta, layer, padded, graph, x):
    # In float32, a vanishing gradient, such as that of a key bias under a softmax, is a rounding error of the others.
    size = max(float(np.abs(array[np.isfinite(array)]).max(initial=0)) for array in stored.values())
    if "pair" in stored:
        found = torch.zeros(stored["pair"].shape, dtype=x.dtype)
        if graph.relative.coordinates.grad is not None:
            found[padded.edges_of(graph.neighbors)] = graph.relative.coordinates.grad[:, 0, 0]
        compare("grad_pair", found[padded.mask], stored["pair"][padded.mask.numpy()], meta, size=size)
    if "features" in stored:
        compare("grad_features", x.grad[:, 0], padded.points(stored["features"]), meta, size=size)
    expected = attention_parameters(stored, "")
    for name, parameter in layer.named_parameters():
        compare(f"gradient of {name}", parameter.grad, expected[name], meta, size=size)


def check_block(arrays, meta):
    padded = Padded(arrays["mask"])
    graph = padded.graph(arrays["pair"], arrays.get("neighbour_index"))
    attention = attention_layer(arrays, meta)
    block = LieBlock(
        attention, attention.in_channels, norm=meta["block_norm"], activation=meta["activation"], eps=meta["norm_eps"]
    ).double()
    load(block, block_parameters(arrays, ""))
    block.train(bool(meta.get("training", False)))
    x = padded.points(arrays["features"])[:, None]
    with torch.no_grad():
        after = block.attend(x, graph)
        if "after_attention" in arrays:
            compare("after_attention", after[:, 0], padded.points(arrays["after_attention"]), meta)
        compare("out", block.feed_forward(after)[:, 0], padded.points(arrays["out"]), meta)


def check_lieconv(arrays, meta):
    padded = Padded(arrays["mask"])
    graph = padded.graph(arrays["pair"], arrays.get("neighbour_index"), valid=arrays.get("neighbour_valid"))
    rank, hidden = len(arrays["kernel_b3"]), len(arrays["kernel_b1"])
    options = {
        "rank": rank,
        "hidden": hidden,
        "activation": meta["activation"],
        "divide": "published" if meta.get("mean", True) else "none",
    }
    coordinates = arrays["pair"].shape[-1]
    in_channels, out_channels = arrays["features"].shape[-1], arrays["out"].shape[-1]
    mix = tensor(arrays["mix_W"]).unflatten(1, (-1, rank))
    parameters = {"weight": mix, "bias": tensor(arrays["mix_b"])}
    for number in (1, 2, 3):
        parameters[f"kernel.linear{number}.weight"] = tensor(arrays[f"kernel_W{number}"])
        parameters[f"kernel.linear{number}.bias"] = tensor(arrays[f"kernel_b{number}"])
    if "down_W" in arrays:
        layer = LieBottleneck(
            in_channels, out_channels, coordinates, widths=(mix.shape[1], mix.shape[0]), norm="none", **options
        )
        parameters = {f"convolution.{name}": array for name, array in parameters.items()}
        for name in ("down", "up"):
            parameters[f"{name}.weight"] = tensor(arrays[f"{name}_W"])
            parameters[f"{name}.bias"] = tensor(arrays[f"{name}_b"])
    else:
        layer = LieConvolution(in_channels, out_channels, coordinates, **options)
    load(layer.double(), parameters)
    out = layer(padded.points(arrays["features"])[:, None], graph)
    compare("out", out[:, 0], padded.points(arrays["out"]), meta)


# --- networks -------------------------------------------------------------------------------------------------


def check_finite_se2(arrays, meta):
    padded = Padded(arrays["mask"])
    slots = arrays["mask"].shape[1]
    rotations, layers = meta["rotations"], meta["layers"]
    seeds = files.choose("readout", meta["readout"], {"only_eqv_sa": 0, "set_transf": meta["n_outputs"]})
    model = FiniteSE2Transformer(
        rotations,
        meta["dim_output"] if seeds else meta["n_outputs"] * meta["dim_output"],
        channels=arrays["layer0.value_b"].shape[0],
        layers=layers,
        heads=meta["heads"],
        content=meta["content"],
        moments=meta.get("moments", 5),
        normalize=files.choose(
            "similarity", meta["similarity"], {"softmax": "softmax", "mean": "mean", "dot_product": "mean"}
        ),
        layer_norm=bool(meta["layer_norm"]),
        seeds=seeds,
        hidden=arrays["layer0.loc_b1"].shape[1],
    )
    for name in ("embed", "head"):
        # In the library the networks of two linear maps have as many hidden units as channels.
        if f"{name}_W1" in arrays:
            first, second = (torch.nn.Linear(*arrays[f"{name}_W{k}"].shape[::-1]) for k in (1, 2))
            setattr(model, name, torch.nn.Sequential(first, torch.nn.ReLU(), second))
    if seeds:
        decoders = len({name.split(".")[0] for name in arrays if name.startswith("decoder")})
        model.decoder = _Decoders(copy.deepcopy(model.decoder) for _ in range(decoders))
    load(model.double(), _finite_se2_parameters(arrays, layers))
    graph = model.geometry(point_clouds(tensor(arrays["positions"]), mask=padded.mask))
    with torch.no_grad():
        fields, prediction = fields_of(model.layers, lambda: model(graph, graph, slots))
    names = ["features_lifted"] + [f"after_layer{number}" for number in range(layers)]
    for name, field in zip(names, fields, strict=True):
        if name in arrays:
            # The file is ordered by rotation, then by point.
            stored = tensor(arrays[name]).unflatten(1, (rotations, slots)).transpose(1, 2)[padded.mask]
            compare(name, field, stored, meta)
    if "pair" in arrays:
        _check_finite_se2_pairs(arrays, meta, padded, graph)
    compare("prediction", prediction.reshape(arrays["prediction"].shape), arrays["prediction"], meta)


class _Decoders(torch.nn.ModuleList):
    """Any number of decoders in place of the one of the library."""

    def forward(self, x, keys):
        for decoder in self:
            x = decoder(x, x)
        return x


def fields_of(blocks, call):
    """Return the input of the first block and the output of each block in a call, and the result of the call."""
    fields = []
    hooks = [blocks[0].register_forward_pre_hook(lambda _, inputs: fields.append(inputs[0]))]
    hooks += [block.register_forward_hook(lambda _, inputs, out: fields.append(out)) for block in blocks]
    result = call()
    for hook in hooks:
        hook.remove()
    return fields, result


def _check_finite_se2_pairs(arrays, meta, padded, graph):
    slots, rotations = arrays["mask"].shape[1], meta["rotations"]
    pair = tensor(arrays["pair"]).unflatten(2, (rotations, slots)).unflatten(1, (rotations, slots))
    source, target = graph.neighbors.source, graph.neighbors.target
    stored = pair.permute(0, 2, 4, 1, 3, 5)[padded.cloud[target], padded.slot[target], padded.slot[source]]
    position = graph.relative.positions
    if graph.relative.row is not None:
        position = position[graph.relative.row]
    compare("translation of pair", position[:, :, None].expand_as(stored[..., :2]), stored[..., :2], meta)
    index = graph.group.relative_index.double()
    compare("index of pair", index.expand_as(stored[..., 2]), stored[..., 2], meta)


def _finite_se2_parameters(arrays, layers):
    parameters = {}
    if "embed_constant" in arrays:
        parameters["constant"] = tensor(arrays["embed_constant"])
    else:
        parameters |= _two_linears(arrays, "embed", "embed")
    for number in range(layers):
        theirs, ours = f"layer{number}.", f"layers.{number}"
        parameters |= _set_projections(arrays, theirs, f"{ours}.attend")
        for k in (1, 2):
            weight, bias = tensor(arrays[f"{theirs}loc_W{k}"]), tensor(arrays[f"{theirs}loc_b{k}"])
            parameters[f"{ours}.location{k}"] = weight if k == 1 else weight[:, 0]
            parameters[f"{ours}.location_bias{k}"] = bias if k == 1 else bias[:, 0]
    if "head_W1" in arrays:
        return parameters | _two_linears(arrays, "head", "head")
    seeds = tensor(arrays["pool_seeds"])
    parameters["seeds"] = seeds.reshape(-1, seeds.shape[-1])
    queries = [name for name in arrays if name.endswith("query_W") and not name.startswith("grad_")]
    pool = next(name for name in queries if not name.startswith(("layer", "decoder"))).removesuffix("query_W")
    decoders = sorted(name.removesuffix(".query_W") for name in queries if name.startswith("decoder"))
    places = {pool: "pool"} | {f"{name}.": f"decoder.{name.removeprefix('decoder')}" for name in decoders}
    for theirs, ours in places.items():
        parameters |= _set_projections(arrays, theirs, f"{ours}.attend")
    return parameters | linear(arrays, "head", "head")


def _set_projections(arrays, theirs, ours):
    parameters = {}
    for their_name, our_name in (("query", "query"), ("key", "key"), ("value", "value"), ("out", "output")):
        parameters |= linear(arrays, theirs + their_name, f"{ours}.{our_name}")
    for number in (0, 1):
        parameters |= norm_parameters(arrays, f"{theirs}norm{number}", f"{ours}.norm{number}")
    return parameters


def _two_linears(arrays, theirs, ours):
    names = {}
    for number, place in ((1, 0), (2, 2)):
        names[f"{ours}.{place}.weight"] = tensor(arrays[f"{theirs}_W{number}"])
        names[f"{ours}.{place}.bias"] = tensor(arrays[f"{theirs}_b{number}"])
    return names


def network(arrays, meta, clouds=None):
    """Return a LieTransformer with the weights of the file, on frames from the draws of the file."""
    name = meta["group"]
    heads, layers = meta["heads"], meta["layers"]
    order = files.choose("readout", meta["readout"], {"lieconv": "point_first", "model_1": "pool_first"})
    point_first = order == "point_first"
    last = "readout_b" if point_first else "head_b3"
    norms = {} if point_first else head_norms(arrays)
    model = LieTransformer(
        arrays["embed_W"].shape[1],
        len(arrays[last]),
        space=space_of(name),
        frames=lift_of(arrays, meta, clouds),
        neighborhood=AllPairs(),
        channels=len(arrays["embed_b"]),
        layers=layers,
        heads=heads,
        lifting=Lifting(
            PublishedCoordinates(COORDINATES.get(name, "log")),
            bound=files.choose("squash", meta["squash"], {"none": False, "tanh": True}),
            local=0,
        ),
        attention=AttentionOptions(
            activation=meta["activation"],
            norm=meta["block_norm"],
            eps=meta["norm_eps"],
            **_widths(arrays, meta, "block0."),
            **published_kernel(meta["kernel"], attention_fn=meta["normalisation"]),
        ),
        readout=Readout(
            order=order,
            pool=meta["pool"],
            # The authors also build one for the point-wise read-out, and do not use it.
            norm=not point_first and (meta["output_norm"] == "layer" or bool(norms)),
            activation=meta["activation"],
        ),
    ).double()
    if any("running" in name for name in norms):
        model.head.norms = torch.nn.ModuleList(torch.nn.BatchNorm1d(len(arrays["embed_b"])).double() for _ in range(3))
    for norm in model.head.norms:
        norm.eps = meta["norm_eps"]
    parameters = linear(arrays, "embed", "embed")
    for number in range(layers):
        block = block_parameters(arrays, f"block{number}.")
        parameters |= {f"blocks.{number}.{name}": array for name, array in block.items()}
    if point_first:
        parameters |= linear(arrays, "readout", "head.linears.0")
    else:
        parameters |= norms
    for number in () if point_first else (1, 2, 3):
        parameters[f"head.linears.{number - 1}.weight"] = tensor(arrays[f"head_W{number}"])
        parameters[f"head.linears.{number - 1}.bias"] = tensor(arrays[f"head_b{number}"])
    return load(model, parameters)


NORM_PARTS = {"gain": "weight", "weight": "weight", "gamma": "weight", "scale": "weight"}
NORM_PARTS |= {"bias": "bias", "beta": "bias", "shift": "bias", "mean": "running_mean", "var": "running_var"}


def head_norms(arrays):
    """Return the normalization before each linear map of the head, for any order of the parts of its names."""
    found = {}
    for name, array in arrays.items():
        words = re.findall(r"[a-z]+|[0-9]+", name.lower())
        numbers = [int(word) for word in words if word.isdigit()]
        parts = [NORM_PARTS[word] for word in words if word in NORM_PARTS]
        if not {"block", "grad"} & set(words) and {"head", "norm", "ln"} & set(words) and numbers and parts:
            found.setdefault(numbers[-1], {})[parts[-1]] = tensor(array)
    parameters = {}
    for place, number in enumerate(sorted(found)):
        parameters |= {f"head.norms.{place}.{part}": array for part, array in found[number].items()}
    return parameters


def lift_of(arrays, meta, clouds):
    """Return the frames of the file as a lift. ``clouds`` is given if the clouds have no own draws."""
    if clouds is not None and meta["group"] == "SE2grid":
        return FiniteFrames(cyclic(meta["lift_samples"]))
    frames = None if clouds is not None else frames_of(arrays, meta, Padded(arrays["mask"]))
    return None if frames is None else GivenFrames(frames)


def check_model(arrays, meta):
    padded, _, pairs = check_pairs(arrays, meta)
    model = network(arrays, meta).train(bool(meta.get("training", False)))
    data = Data(x=padded.points(arrays["features"]))
    with torch.no_grad():
        graph = model.geometry(point_clouds(positions(arrays, meta), mask=padded.mask))
        if meta["group"].endswith("quat") or meta["group"] in ANGLES:
            # Signs and turns are those of the file.
            relative = graph.relative.with_coordinates(pairs)
            graph = graph.with_relative(relative.bounded() if meta["squash"] == "tanh" else relative)
        fields, prediction = fields_of(model.blocks, lambda: model(data, graph))
        names = ["embedded"] + [f"after_block{number}" for number in range(meta["layers"])]
        for name, field in zip(names, fields, strict=True):
            if name in arrays:
                stored = tensor(arrays[name]).unflatten(1, (-1, meta["lift_samples"]))[padded.mask]
                compare(name, field, stored, meta)
        compare("prediction", prediction, arrays["prediction"], meta)


def check_hamiltonian(arrays, meta):
    q, p, mass, spring = (tensor(arrays[name]) for name in ("q", "p", "mass", "spring"))
    features = torch.stack([mass, spring], dim=-1)
    # Logarithms jump at half turns. The numbers of a file hold between the jumps.
    dynamics = HamiltonianDynamics(network(arrays, meta, len(q)), jumps="allow")
    springs = HamiltonianDynamics(_Springs(), center=False)
    with torch.no_grad():
        energy = dynamics.hamiltonian(q, p, mass, features)
        found = {
            "hamiltonian": energy,
            "potential": energy - (p.square().sum(-1) / (2 * mass)).sum(-1),
            "field": flat(*dynamics.field(q, p, mass, features)),
            "true_potential": springs.hamiltonian(q, torch.zeros_like(p), mass, features),
            "true_field": flat(*springs.field(q, p, mass, features)),
        }
        if "trajectory" in arrays:
            path = dynamics.trajectory(q, p, mass, tensor(arrays["times"]), features)
            found["trajectory"] = flat(path.position, path.momentum).transpose(0, 1)
    compare_stored(found, arrays, meta)


class _Springs(torch.nn.Module):
    """The potential of the simulated system, 1/2 sum_ij k_i k_j |q_i - q_j|^2."""

    def forward(self, data):
        stiffness = data.x[:, 1]
        same = data.batch[:, None] == data.batch
        squared = (data.pos[:, None] - data.pos).square().sum(-1)
        energy = 0.5 * (same * stiffness[:, None] * stiffness * squared).sum(1)
        return energy.new_zeros(int(data.batch.max()) + 1).index_add(0, data.batch, energy)


def flat(position, momentum):
    return torch.cat([position.flatten(-2), momentum.flatten(-2)], dim=-1)


KINDS = {
    "explog": check_explog,
    "lift": check_lift,
    "attention": check_attention,
    "block": check_block,
    "model": check_model,
    "hamiltonian": check_hamiltonian,
    "finite_se2": check_finite_se2,
    "lieconv": check_lieconv,
    "fps": check_subsampling,
}
