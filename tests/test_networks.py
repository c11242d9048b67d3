"""All networks of the library have all properties, and networks with one fault each fail the property it belongs to."""

from __future__ import annotations

from functools import cache, partial
from itertools import product

import pytest
import torch
from torch import nn
from torch_geometric.data import Batch, Data

from lieattn.certify import certify
from lieattn.geometry import (
    AllPairs,
    FiniteFrames,
    Nearest,
    PixelSquare,
    PrincipalFrames,
    Radius,
    SampledFrames,
    ScaleFrames,
)
from lieattn.groups import (
    SE,
    SO,
    Dilations,
    E,
    FiniteGroup,
    RotationDilations,
    Sim,
    Translations,
    cyclic,
    dihedral,
    full_octahedral,
    octahedral,
    pyritohedral,
    tetrahedral,
)
from lieattn.models import (
    AffineNet,
    AffineSelfConvNet,
    AttentionOptions,
    AttentiveAllCNN,
    AttentiveCNN,
    AttentiveDenseNet,
    AttentiveNet,
    AttentiveResNet,
    ConvolutionOptions,
    DirectionConvNet,
    DirectionOptions,
    EnergyForces,
    Ensemble,
    FieldModel,
    FiniteSE2Transformer,
    FramewiseOptions,
    FramewiseTransformer,
    GSANet,
    GSAOptions,
    HamiltonianDynamics,
    ImageOptions,
    ImageTransformer,
    LieConvNet,
    LieTransformer,
    Lifting,
    Readout,
    Rescaled,
    Stages,
)
from lieattn.models.irreps import DistanceTransformer, SE3Transformer, TensorFieldNetwork
from lieattn.models.published import PublishedCoordinates, published_table
from lieattn.nn import DipoleHead, FieldHead, Heads, InvariantHead, PolarizabilityHead, RotationHead, VectorHead
from lieattn.nn.relative import RelativePositionTable
from lieattn.reps import Irreps, Permutation, Pseudoscalar, Pseudovector, Scalar, SymmetricTensor, Vector
from lieattn.spaces import Euclidean, Orbits, PositionDirection, Sphere
from lieattn.testing import PROPERTIES, assert_certified, assert_conforms, randomize
from lieattn_datasets import DropPoints


def molecules(dim: int = 3, *, unit: bool = False) -> list[Data]:
    """Return three clouds with features, charges, vectors, masses and times, optionally on the unit sphere."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for size in (6, 4, 5):
        pos = torch.randn(size, dim, generator=generator, dtype=torch.float64)
        found.append(
            Data(
                x=torch.rand(size, 2, generator=generator) + 0.5,
                z=torch.randint(6, 9, (size,), generator=generator),
                pos=pos / pos.norm(dim=1, keepdim=True) if unit else pos,
                vel=torch.randn(size, dim, generator=generator),
                time=torch.linspace(0, 0.2, 2)[None],
            )
        )
    return found


def bonded() -> list[Data]:
    """Return molecules with features of some of the pairs of their atoms."""
    found, generator = molecules(), torch.Generator().manual_seed(3)
    for cloud in found:
        first, second = torch.combinations(torch.arange(len(cloud.pos)))[::2].T
        cloud.edge_index = torch.stack([torch.cat([first, second]), torch.cat([second, first])])
        cloud.edge_attr = torch.rand(2 * len(first), 2, generator=generator)
    return found


def crystals(*, slab: bool = True) -> list[Data]:
    """Return clouds in periodic boxes with oblique edges, one of them a slab."""
    found = molecules()
    edges = torch.tensor([[4.0, 0.3, 0.0], [0.5, 5.0, 0.2], [0.0, -0.4, 4.5]], dtype=torch.float64)
    for number, cloud in enumerate(found):
        cloud.cell, cloud.pbc = (edges + 0.1 * number)[None], torch.tensor([[True, True, not slab or number != 1]])
    return found


def directed() -> list[Data]:
    """Return positions with directions."""
    found = molecules()
    for cloud in found:
        cloud.pos = torch.cat([cloud.pos, torch.nn.functional.normalize(cloud.vel.double(), dim=1)], dim=1)
    return found


def images(size: int, channels: int = 1, number: int = 2) -> torch.Tensor:
    return torch.rand(number, channels, size, size, generator=torch.Generator().manual_seed(2))


def pixels(size: int, channels: int = 1) -> list[Data]:
    """Return the same images as point sets."""
    axis = torch.arange(size) - (size - 1) / 2
    pos = torch.stack(torch.meshgrid(-axis, axis, indexing="ij"), dim=-1).flatten(0, 1).flip(1)
    grid = torch.tensor([[size, size]])
    return [Data(x=image.flatten(1).mT, pos=pos, grid=grid) for image in images(size, channels)]


def windy(size: int) -> list[Data]:
    """Return images as point sets with a vector at each pixel."""
    found = pixels(size)
    for number, image in enumerate(found):
        image.vel = torch.randn(size**2, 2, generator=torch.Generator().manual_seed(number))
    return found


def holed(size: int) -> list[Data]:
    """Return images as point sets that lack a third of their pixels."""
    return [DropPoints(number, share=0.3)(image) for number, image in enumerate(pixels(size))]


def fielded(dim: int = 3) -> list[Data]:
    """Return molecules with a spin at each point, and the strain and an external field of each cloud."""
    generator, found = torch.Generator().manual_seed(4), molecules(dim)
    for cloud in found:
        for name, rep in FIELDS[dim].items():
            rows = 1 if name in ("strain", "external") else len(cloud.pos)
            cloud[name] = torch.randn(rows, rep.dim, generator=generator)
    return found


def of_fields(name: str, dim: int | str) -> list[Data]:
    """Return the data of a row of ``OF_FIELDS``."""
    if dim == "pixels":
        found = windy(4)
        for image in found:
            image.spin = image.vel[:, :1]
        return found
    return firsts(fielded(dim)) if name in ("fields_gsa", "fields_attentive") else fielded(dim)


def origin_data(name: str, dim: int) -> list[Data]:
    """Return the data of a row of ``ABOUT_ORIGIN``."""
    return firsts(molecules(dim)) if name in ("origin_gsa", "origin_attentive", "origin_affine") else molecules(dim)


def permuted(dim: int | str, name: str) -> list[Data]:
    """Return clouds or images with channels at each point that a group permutes."""
    generator, found = torch.Generator().manual_seed(5), pixels(4) if dim == "pixels" else molecules(dim)
    for cloud in found:
        cloud[name] = torch.randn(len(cloud.pos), PERMUTED[name].dim, generator=generator)
    return found


def lie(space, frames=None, **options) -> LieTransformer:
    small = {"neighborhood": AllPairs(), "channels": 8, "layers": 1, "heads": 2, **options}
    return LieTransformer(2, 2, space=space, frames=frames, **{"attention": AttentionOptions(hidden=4), **small})


def gsa(group: FiniteGroup, neighborhood, **options) -> GSANet:
    small = {"channels": 6, "blocks": (1,), "heads": 2, **options}
    return GSANet(group, 1, 2, neighborhood=neighborhood, **small)


def framewise(frames, out_channels: int = 2, **options) -> FramewiseTransformer:
    return FramewiseTransformer(frames, 2, out_channels, channels=4, layers=1, **options)


def image(group: FiniteGroup, neighborhood, **options) -> ImageTransformer:
    small = {"channels": 4, "blocks": (1, 1), "heads": 1, **options}
    return ImageTransformer(**{"group": group, "in_channels": 1, "out_channels": 2, **small}, neighborhood=neighborhood)


def steerable(model: type, **options) -> nn.Module:
    return model(
        2, 1, **{"neighborhood": Radius(3.0), "channels": 4, "layers": 1, "vector_inputs": ("vel",), **options}
    )


def field(head: nn.Module, **options) -> FieldModel:
    return FieldModel(framewise(tetrahedral(), vector_inputs=("vel",)), head, **options)


def several() -> dict[str, nn.Module]:
    return {"numbers": InvariantHead(4, 2), "charge": InvariantHead(4, 1, pool="none"), "dipole": DipoleHead(4)}


def conv(convolution: ConvolutionOptions | None = None, **options) -> LieConvNet:
    small = {"neighborhood": AllPairs(), "channels": 8, "layers": 1, "frames": PrincipalFrames(), **options}
    return LieConvNet(2, 2, convolution=convolution or ConvolutionOptions(rank=2, hidden=4), **small)


FORCES = {"neighborhood": AllPairs(), "channels": 8, "layers": 1, "heads": 2}
AFFINE = {"blocks": 1, "channels": 2, "heads": 2, "window": RelativePositionTable.square(3, border="zero")}
SMALL = {"blocks": 1, "channels": 2, "squeeze_excite": True}
NEAR = Radius(2.5137, smooth=True)
FIELDS = {
    2: {"spin": Pseudoscalar(), "vel": Vector(2), "strain": SymmetricTensor(2), "external": Vector(2)},
    3: {"spin": Pseudovector(), "vel": Vector(3), "strain": SymmetricTensor(3), "external": Irreps("1o")},
}
# Networks with inputs of all types: constructor of the inputs, dimension, name of a group with reflections.
OF_FIELDS = {
    "fields_gsa": (lambda to: gsa(full_octahedral(), NEAR, channels=8, vector_inputs=to), 3, "Oh"),
    "fields_attentive": (
        lambda to: AttentiveNet(dihedral(3), 1, 2, neighborhood=NEAR, channels=4, layers=2, vector_inputs=to),
        2,
        "D3",
    ),
    "fields_framewise": (lambda to: framewise(dihedral(4), vector_inputs=to), 2, "D4"),
    "fields_principal": (
        lambda to: framewise(PrincipalFrames(improper=True), neighborhood=NEAR, kind="vector", vector_inputs=to),
        3,
        "E(3)",
    ),
    "fields_spins": (  # of points on a line too, where principal axes follow them
        lambda to: framewise(PrincipalFrames(improper=True), vector_inputs={"spin": to["spin"]}),
        3,
        "E(3)",
    ),
    "fields_directions": (
        lambda to: steerable(
            partial(DirectionConvNet, pyritohedral()),
            options=DirectionOptions(axis=(1.0, 2.0, 0.0)),
            vector_inputs=to,
        ),
        3,
        "Th",
    ),
    "fields_lie": (
        lambda to: lie(Euclidean(E(3)), PrincipalFrames(), lifting=Lifting(local=5, cutoff=2.0), vector_inputs=to),
        3,
        "E(3)",
    ),
    "fields_tfn": (lambda to: steerable(TensorFieldNetwork, layers=2, vector_inputs=to), 3, "E(3)"),
    "fields_distances": (
        lambda to: steerable(DistanceTransformer, heads=2, kind="vector", vector_inputs=to),
        3,
        "E(3)",
    ),
    "fields_image": (
        lambda to: AffineSelfConvNet(dihedral(4), 1, 2, **AFFINE, vector_inputs={"spin": to["spin"]}),
        "pixels",
        "D4",
    ),
}
# Networks that see positions relative to the origin: constructor, dimension, name of the group, which fixes the origin.
SEEN = {"vector_inputs": ("vel", "pos")}
ABOUT_ORIGIN = {
    "origin_gsa": (lambda: gsa(cyclic(4), NEAR, **SEEN), 2, "C4"),
    "origin_attentive": (
        lambda: AttentiveNet(dihedral(3), 1, 2, neighborhood=NEAR, channels=4, layers=2, **SEEN),
        2,
        "D3",
    ),
    "origin_affine": (lambda: AffineNet(tetrahedral(), 1, 3, neighborhood=NEAR, channels=4, blocks=2, **SEEN), 3, "T"),
    "origin_framewise": (lambda: framewise(octahedral(), **SEEN), 3, "O"),
    "origin_principal": (lambda: framewise(PrincipalFrames(), neighborhood=NEAR, kind="vector", **SEEN), 3, "SO(3)"),
    "origin_directions": (lambda: steerable(partial(DirectionConvNet, pyritohedral()), **SEEN), 3, "Th"),
    "origin_lie": (lambda: lie(Euclidean(E(3)), PrincipalFrames(), **SEEN), 3, "O(3)"),
    "origin_lie_conv": (lambda: conv(frames=tetrahedral(), **SEEN), 3, "T"),
    "origin_tfn": (lambda: steerable(TensorFieldNetwork, layers=2, **SEEN), 3, "O(3)"),
    "origin_distances": (lambda: steerable(DistanceTransformer, heads=2, kind="vector", **SEEN), 3, "O(3)"),
    "origin_forces": (
        lambda: EnergyForces(steerable(DistanceTransformer, heads=2, pool="sum", **SEEN)),
        3,
        "O(3)",
    ),
    "origin_field": (lambda: FieldModel(framewise(tetrahedral(), **SEEN), VectorHead(4)), 3, "T"),
}
CORNERS = [[1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]
PERMUTED = {
    "cameras": Permutation(dihedral(4), points=[[1, 0], [0, 1], [-1, 0], [0, -1]]),
    "sites": Permutation(tetrahedral(), points=CORNERS),
    "faces": Permutation(octahedral(), points=torch.cat([torch.eye(3), -torch.eye(3)])),
}
# Networks with channels that the group permutes: constructor, dimension, name of the channels, name of the group.
OF_PERMUTED = {
    "permuted_affine": (
        lambda to: AffineNet(dihedral(4), 2, 3, neighborhood=NEAR, channels=4, blocks=2, vector_inputs=to),
        2,
        "cameras",
        "D4",
    ),
    "permuted_subgroup": (lambda to: framewise(cyclic(2), vector_inputs=to), 2, "cameras", "C2"),
    "permuted_image": (
        lambda to: AffineSelfConvNet(dihedral(4), 1, 2, **AFFINE, vector_inputs=to),
        "pixels",
        "cameras",
        "D4",
    ),
    "permuted_framewise": (lambda to: framewise(octahedral(), vector_inputs=to), 3, "faces", "O"),
    "permuted_lie": (
        lambda to: lie(Euclidean(SE(3)), tetrahedral(), neighborhood=NEAR, vector_inputs=to),
        3,
        "sites",
        "T",
    ),
    "permuted_directions": (
        lambda to: steerable(partial(DirectionConvNet, tetrahedral()), vector_inputs=to),
        3,
        "sites",
        "T",
    ),
    "permuted_field": (
        lambda to: FieldModel(framewise(tetrahedral(), vector_inputs=to), FieldHead(4, 2 * to["sites"])),
        3,
        "sites",
        "T",
    ),
}
# Constructor, data, name of the group. Add a line for each new network.
NETWORKS = {
    "gsa_points": (lambda: gsa(tetrahedral(), Radius(2.0137), channels=8), lambda: firsts(molecules()), "T"),
    "gsa_images": (lambda: gsa(dihedral(4), PixelSquare(3), blocks=(1, 0)), lambda: pixels(4), "D4"),
    "gsa_stages": (
        lambda: gsa(octahedral(), Radius(2.0137), blocks=Stages((1, 1, 1), share=0.5), channels=8),
        lambda: firsts(molecules()),
        "O",
    ),
    "gsa_stages_of_ties": (
        lambda: gsa(dihedral(8), Radius(1.5), blocks=Stages((1, 1), share=0.25)),
        lambda: pixels(6),
        "D8",
    ),
    "affine_points": (
        lambda: AffineNet(tetrahedral(), 1, 3, neighborhood=Radius(2.0137), channels=4, blocks=2, hidden=4),
        lambda: firsts(molecules()),
        "T",
    ),
    "affine_points_stand_alone": (
        lambda: AffineNet(
            cyclic(12), 2, 3, neighborhood=AllPairs(), layer="stand-alone", vector_inputs=("vel",), **SMALL
        ),
        lambda: molecules(2),
        "C12",
    ),
    "affine_points_convolution": (
        lambda: AffineNet(dihedral(3), 2, 3, neighborhood=NEAR, layer="convolution", pool="max", **SMALL),
        lambda: molecules(2),
        "D3",
    ),
    "attentive_points": (
        lambda: AttentiveNet(tetrahedral(), 1, 3, neighborhood=Radius(2.0137), channels=4, layers=2, hidden=4),
        lambda: firsts(molecules()),
        "T",
    ),
    "attentive_points_input": (
        lambda: AttentiveNet(
            dihedral(3), 2, 3, neighborhood=AllPairs(), local=Radius(2.0137), attention="input", vector_inputs=("vel",)
        ),
        lambda: molecules(2),
        "D3",
    ),
    **{
        name: (partial(make, FIELDS[2 if dim == "pixels" else dim]), partial(of_fields, name, dim), group)
        for name, (make, dim, group) in OF_FIELDS.items()
    },
    **{name: (make, partial(origin_data, name, dim), group) for name, (make, dim, group) in ABOUT_ORIGIN.items()},
    **{
        name: (partial(make, {at: PERMUTED[at]}), partial(permuted, dim, at), group)
        for name, (make, dim, at, group) in OF_PERMUTED.items()
    },
    "gsa_squares": (lambda: gsa(cyclic(8), PixelSquare(3)), lambda: pixels(4), "C8 on pixels"),
    "gsa_published": (
        lambda: gsa(
            cyclic(4), PixelSquare(3), options=GSAOptions(frame_table=published_table(cyclic(4)), pattern="query_sum")
        ),
        lambda: pixels(4),
        "trivial2",
    ),
    "framewise": (lambda: framewise(octahedral(), vector_inputs=("vel",)), molecules, "O"),
    "framewise_principal": (lambda: framewise(PrincipalFrames(), vector_inputs=("vel",)), molecules, "SE(3)"),
    "framewise_vector": (lambda: framewise(tetrahedral(), 1, kind="vector"), molecules, "T"),
    "framewise_point": (
        lambda: framewise(dihedral(3), kind="vector", pool="none", vector_inputs=("vel",)),
        lambda: molecules(2),
        "D3",
    ),
    "framewise_principal_vector": (
        lambda: framewise(PrincipalFrames(), 1, vector_inputs=("vel",), kind="vector"),
        molecules,
        "SE(3)",
    ),
    "framewise_bonds": (
        lambda: framewise(tetrahedral(), neighborhood=Radius(3.0), options=FramewiseOptions(edge_channels=2)),
        bonded,
        "T",
    ),
    "directions_bonds": (
        lambda: steerable(partial(DirectionConvNet, PrincipalFrames()), options=DirectionOptions(edge_channels=2)),
        bonded,
        "SE(3)",
    ),
    "directions": (lambda: steerable(partial(DirectionConvNet, tetrahedral())), molecules, "T"),
    "directions_normed": (
        lambda: steerable(partial(DirectionConvNet, octahedral()), options=DirectionOptions(norm="layer")),
        molecules,
        "O",
    ),
    "directions_principal_vector": (
        lambda: steerable(partial(DirectionConvNet, PrincipalFrames()), kind="vector", pool="none"),
        molecules,
        "SE(3)",
    ),
    "tfn": (lambda: steerable(TensorFieldNetwork), molecules, "E(3)"),
    "tfn_vector": (
        lambda: steerable(TensorFieldNetwork, degree=1, kind="vector", pool="none"),
        molecules,
        "E(3)",
    ),
    "framewise_crystal": (
        lambda: framewise(
            octahedral(),
            neighborhood=Radius(2.5, smooth=True),
            vector_inputs=("vel",),
            options=FramewiseOptions(attention="neighborhood"),
        ),
        crystals,
        "O",
    ),
    "tfn_periodic": (lambda: steerable(TensorFieldNetwork, degree=1), crystals, "E(3)"),
    "se3_transformer": (lambda: steerable(SE3Transformer, degree=1, heads=2, kind="vector"), molecules, "E(3)"),
    "distances": (lambda: steerable(DistanceTransformer, heads=2, pool="none"), molecules, "E(3)"),
    "distances_vector": (lambda: steerable(DistanceTransformer, heads=2, kind="vector"), molecules, "E(3)"),
    "lie_translations": (lambda: lie(Euclidean(Translations(3))), molecules, "R^3"),
    "lie_principal": (lambda: lie(Euclidean(SE(3)), PrincipalFrames()), molecules, "SE(3)"),
    "lie_mirrors": (lambda: lie(Euclidean(E(3)), PrincipalFrames()), molecules, "E(3)"),
    "lie_plane": (lambda: lie(Euclidean(SE(2)), PrincipalFrames()), lambda: molecules(2), "SE(2)"),
    "lie_similar": (lambda: lie(Euclidean(Sim(2)), PrincipalFrames()), lambda: molecules(2), "Sim(2)"),
    "lie_finite": (lambda: lie(Euclidean(SE(3)), FiniteFrames(tetrahedral())), molecules, "T"),
    "lie_vectors": (
        lambda: lie(Euclidean(SE(3)), PrincipalFrames("neighborhood"), vector_inputs=("vel",)),
        molecules,
        "SE(3)",
    ),
    "lie_similar_vectors": (
        lambda: lie(Euclidean(Sim(2)), PrincipalFrames(), vector_inputs=("vel",)),
        lambda: molecules(2),
        "Sim(2)",
    ),
    "lie_directions_vectors": (
        lambda: lie(PositionDirection(), PrincipalFrames(), vector_inputs=("vel",)),
        directed,
        "SE(3)",
    ),
    "gsa_directions_vectors": (
        lambda: gsa(PrincipalFrames(), AllPairs(), space=PositionDirection(), vector_inputs=("vel",)),
        lambda: firsts(directed()),
        "SE(3)",
    ),
    "lie_logs": (
        lambda: lie(Euclidean(SE(2)), FiniteFrames(cyclic(6)), lifting=Lifting("log")),
        lambda: molecules(2),
        "C6",
    ),
    "lie_published_logs": (
        lambda: lie(Euclidean(SE(2)), FiniteFrames(cyclic(10)), lifting=Lifting(PublishedCoordinates("log"))),
        lambda: molecules(2),
        "C10",
    ),
    "lie_sampled": (lambda: lie(Euclidean(SE(3)), SampledFrames(2)), molecules, "R^3"),
    "lie_sphere": (lambda: lie(Sphere(), PrincipalFrames()), lambda: molecules(unit=True), "SO(3)"),
    "lie_orbits": (lambda: lie(Orbits(SO(3)), PrincipalFrames()), molecules, "SO(3)"),
    "lie_scales": (lambda: lie(Orbits(RotationDilations(2))), lambda: molecules(2), "R+xSO(2)"),
    "lie_directions": (lambda: lie(PositionDirection(), PrincipalFrames()), directed, "SE(3)"),
    "lie_conv": (conv, molecules, "SE(3)"),
    "lie_conv_thinned": (lambda: conv(ConvolutionOptions(downsampling=0.5)), molecules, "SE(3)"),
    "finite_se2": (
        lambda: FiniteSE2Transformer(3, channels=8, layers=1, heads=2, content="pairwise_distances"),
        lambda: molecules(2),
        "C3",
    ),
    "finite_se2_squares": (
        lambda: FiniteSE2Transformer(8, channels=8, layers=1, heads=2, neighborhood=PixelSquare(3)),
        lambda: molecules(2),
        "C8 on pixels",
    ),
    "lie_squares": (
        lambda: lie(Euclidean(SE(2)), FiniteFrames(cyclic(8)), neighborhood=PixelSquare(3)),
        lambda: pixels(5, 2),
        "C8 on pixels",
    ),
    "lie_proper": (lambda: lie(Euclidean(E(3)), PrincipalFrames(improper=False)), molecules, "SE(3)"),
    "lie_proper_pose": (
        lambda: lie(Euclidean(E(3)), FiniteFrames(tetrahedral(), PrincipalFrames())),
        molecules,
        "SE(3)",
    ),
    "image_window": (
        lambda: image(cyclic(8), Radius(1.5), blocks=(1,), options=ImageOptions(window=PixelSquare(3))),
        lambda: pixels(4),
        "C8 on pixels",
    ),
    "attentive_squares": (
        lambda: AttentiveNet(cyclic(8), 1, 2, neighborhood=Radius(1.5), local=PixelSquare(3), channels=4, layers=2),
        lambda: pixels(4),
        "C8 on pixels",
    ),
    "framewise_squares": (
        lambda: framewise(
            cyclic(8), neighborhood=PixelSquare(3), options=FramewiseOptions(attention="neighborhood", positions=False)
        ),
        lambda: pixels(5, 2),
        "C8 on pixels",
    ),
    # Windows of messages vanish within the square, so the squares have no effect.
    "framewise_square_messages": (
        lambda: framewise(cyclic(8), neighborhood=PixelSquare(5)),
        lambda: pixels(5, 2),
        "C8",
    ),
    "image_turned": (lambda: image(cyclic(8), Radius(1.5)), lambda: pixels(5), "C8"),
    "image_holes": (lambda: image(dihedral(8), Radius(2.0), pool="none"), lambda: holed(5), "D8"),
    "image_separable": (
        lambda: image(cyclic(8), Radius(2.0), options=ImageOptions(convolution="separable")),
        lambda: holed(5),
        "C8",
    ),
    "image_squares": (lambda: image(dihedral(4), PixelSquare(3), vector_inputs=("vel",)), lambda: windy(6), "D4"),
    "image_points": (
        lambda: image(tetrahedral(), Radius(2.0), in_channels=2, pool="none", kind="vector", channels=(2, 4)),
        molecules,
        "T",
    ),
    "tfn_cubes": (
        lambda: steerable(TensorFieldNetwork, degree=1, neighborhood=PixelSquare(3), cutoff=1.5),
        molecules,
        "R^3",
    ),
    "tfn_cubes_within": (
        lambda: steerable(TensorFieldNetwork, degree=1, neighborhood=PixelSquare(5)),
        molecules,
        "E(3)",
    ),
    "framewise_square_cutoff": (
        lambda: framewise(cyclic(8), neighborhood=PixelSquare(3), options=FramewiseOptions(cutoff=3.0)),
        lambda: pixels(5, 2),
        "C8 on pixels",
    ),
    "direction_cubes": (
        lambda: steerable(
            partial(DirectionConvNet, tetrahedral()), neighborhood=PixelSquare(3), options=DirectionOptions(cutoff=3.0)
        ),
        molecules,
        "T",
    ),
    "direction_cubes_principal": (
        lambda: steerable(
            partial(DirectionConvNet, PrincipalFrames()),
            neighborhood=PixelSquare(3),
            options=DirectionOptions(cutoff=3.0),
        ),
        molecules,
        "R^3",
    ),
    "stresses": (
        lambda: EnergyForces(steerable(DistanceTransformer, heads=2, pool="sum"), stress=True),
        lambda: crystals(slab=False),
        "E(3)",
    ),
    "forces": (lambda: EnergyForces(steerable(TensorFieldNetwork, degree=1)), molecules, "E(3)"),
    "forces_principal": (
        lambda: EnergyForces(
            LieTransformer(2, 1, space=Euclidean(SE(3)), frames=PrincipalFrames(), **FORCES), jumps="allow"
        ),
        molecules,
        "SE(3)",
    ),
    "hamiltonian": (lambda: HamiltonianDynamics(framewise(dihedral(1), 1)), lambda: molecules(2), "D1"),
    "field_vector": (lambda: field(VectorHead(4)), molecules, "T"),
    "field_position": (lambda: field(VectorHead(4), start={"pos": 1.0, "vel": 0.5}), molecules, "T"),
    "field_dipole": (lambda: field(DipoleHead(4)), molecules, "T"),
    "field_several": (lambda: field(Heads(several())), molecules, "T"),
    "forces_several": (
        lambda: EnergyForces(field(Heads(several() | {"energy": InvariantHead(4, 1, pool="sum")}))),
        molecules,
        "T",
    ),
    "field_tensor_principal": (
        lambda: FieldModel(framewise(PrincipalFrames()), PolarizabilityHead(4)),
        molecules,
        "SE(3)",
    ),
    "field_tensor": (lambda: field(PolarizabilityHead(4)), molecules, "T"),
    "field_rotation": (lambda: field(RotationHead(4)), molecules, "T"),
    "attentive_cnn": (
        lambda: AttentiveCNN(cyclic(4), channels=2, attention="full", spatial_size=3),
        lambda: images(28),
        "C4",
    ),
    "attentive_all_cnn": (lambda: AttentiveAllCNN(dihedral(4), 1, 2, channels=2), lambda: pixels(8), "D4"),
    "attentive_resnet": (
        lambda: AttentiveResNet(cyclic(4), 1, 2, blocks=1, channels=(2, 2, 2), attention="pose"),
        lambda: images(8),
        "C4",
    ),
    "attentive_densenet": (
        lambda: AttentiveDenseNet(cyclic(4), 1, 2, growth=2),
        lambda: images(80),
        "C4",
    ),
    "affine": (lambda: AffineSelfConvNet(dihedral(4), 1, 2, **AFFINE), lambda: images(8), "D4"),
    "affine_strided": (
        lambda: AffineSelfConvNet(cyclic(4), 1, 2, downsampling="strided", **AFFINE),
        lambda: images(8),
        "trivial2",
    ),
    "affine_field": (
        lambda: FieldModel(AffineSelfConvNet(cyclic(4), 1, blocks=1, channels=2, heads=2), InvariantHead(32, 2)),
        lambda: images(8),
        "C4",
    ),
    "affine_vectors": (
        lambda: FieldModel(
            AffineSelfConvNet(cyclic(4), 1, blocks=1, channels=2, heads=2, vector_inputs=("vel",)), VectorHead(32, 2)
        ),
        lambda: windy(4),
        "C4",
    ),
    "attentive_vectors": (
        lambda: FieldModel(
            AttentiveResNet(cyclic(4), 1, blocks=1, channels=(2, 2, 2), attention="full", vector_inputs=("vel",)),
            VectorHead(2, 2, pool="mean"),
        ),
        lambda: windy(8),
        "C4",
    ),
    "gsa_vectors": (
        lambda: FieldModel(gsa(cyclic(8), Radius(1.5), vector_inputs=("vel",)), VectorHead(6, 2)),
        lambda: windy(4),
        "C8",
    ),
    "gsa_coordinates": (
        lambda: gsa(dihedral(8), Radius(1.5), blocks=Stages((1, 1), crops=(1, 0))),
        lambda: pixels(10),
        "D8",
    ),
    "gsa_dilated": (lambda: gsa(dihedral(4), PixelSquare(3, dilation=2), blocks=(1, 0)), lambda: pixels(8), "D4"),
    "gsa_global": (lambda: gsa(cyclic(4), AllPairs(), options=GSAOptions(length=5.0)), lambda: pixels(4), "C4"),
    "gsa_nearest": (lambda: gsa(dihedral(3), Nearest(4)), lambda: firsts(molecules(2)), "D3"),
    "gsa_principal": (
        lambda: gsa(PrincipalFrames(), Radius(2.0137), vector_inputs=("vel",)),
        lambda: firsts(molecules()),
        "SE(3)",
    ),
    "gsa_principal_vector": (
        lambda: FieldModel(
            gsa(FiniteFrames(tetrahedral(), PrincipalFrames()), Radius(2.0137), vector_inputs=("vel",), channels=8),
            VectorHead(8, pool="none"),
        ),
        lambda: firsts(molecules()),
        "SE(3)",
    ),
    "gsa_scales": (
        lambda: FieldModel(
            gsa(ScaleFrames(cyclic(4)), Radius(1.5), vector_inputs=("vel",)), VectorHead(6, 2, pool="mean")
        ),
        lambda: firsts(molecules(2)),
        "C4",
    ),
    "gsa_absolute": (
        lambda: gsa(cyclic(4), AllPairs(), options=GSAOptions(positions="absolute", values=False)),
        lambda: firsts(molecules(2)),
        "C4",
    ),
    "framewise_separable": (
        lambda: framewise(
            tetrahedral(),
            1,
            kind="vector",
            neighborhood=Radius(2.0137),
            vector_inputs=("vel",),
            options=FramewiseOptions(basis=3, hidden=5, attention="none", angles=2, head="frames", window=2),
        ),
        molecules,
        "T",
    ),
    **{
        f"framewise_posed_{group.name}": (
            partial(framewise, FiniteFrames(group, PrincipalFrames()), 1, kind="vector", neighborhood=Radius(2.0137)),
            molecules,
            name,
        )
        for group, name in ((octahedral(), "SE(3)"), (full_octahedral(), "E(3)"))
    },
    "directions_posed": (
        lambda: steerable(partial(DirectionConvNet, FiniteFrames(octahedral(), PrincipalFrames())), kind="vector"),
        molecules,
        "SE(3)",
    ),
    "directions_improper": (
        lambda: steerable(partial(DirectionConvNet, PrincipalFrames(improper=True)), kind="vector"),
        molecules,
        "E(3)",
    ),
    "lie_batch_norm": (
        lambda: lie(
            Euclidean(SE(2)),
            FiniteFrames(cyclic(3)),
            attention=AttentionOptions(norm="batch_pre"),
            readout=Readout(pool="max", order="point_first"),
        ),
        lambda: molecules(2),
        "C3",
    ),
    "lie_vector": (
        lambda: lie(
            Euclidean(SE(3)),
            PrincipalFrames(),
            neighborhood=Radius(2.5),
            vector_inputs=("vel",),
            lifting=Lifting(radial=3, local=5),
            readout=Readout(kind="vector"),
        ),
        molecules,
        "SE(3)",
    ),
    "lie_vector_finite": (
        lambda: lie(
            None,
            cyclic(3),
            neighborhood=Radius(2.5),
            vector_inputs=("vel",),
            lifting=Lifting(radial=3, local=5),
            readout=Readout(kind="vector", pool="none", order="point_first"),
        ),
        lambda: molecules(2),
        "C3",
    ),
    "lie_conv_vector": (
        lambda: conv(frames=tetrahedral(), vector_inputs=("vel",), readout=Readout(kind="vector", pool="none")),
        molecules,
        "T",
    ),
    "field_lie": (
        lambda: FieldModel(lie(Euclidean(E(3)), PrincipalFrames(), vector_inputs=("vel",)), PolarizabilityHead(8)),
        molecules,
        "E(3)",
    ),
    "rescaled": (
        lambda: Rescaled(framewise(tetrahedral(), 1, pool="sum"), {"energy": 2.0}, {"energy": 3.0}, ["energy"]),
        molecules,
        "T",
    ),
    "ensemble": (
        lambda: Ensemble([steerable(DistanceTransformer, heads=2, pool="sum") for _ in range(2)]),
        molecules,
        "E(3)",
    ),
    "lie_dilations": (lambda: lie(Orbits(Dilations(2))), lambda: molecules(2), "R+(2)"),
    "lie_turns": (lambda: lie(Orbits(SO(2))), lambda: molecules(2), "SO(2)"),
    "lie_similar3": (lambda: lie(Euclidean(Sim(3)), PrincipalFrames()), molecules, "Sim(3)"),
    "lie_conv_attentive": (
        lambda: conv(ConvolutionOptions(downsampling=0.5, attention=AttentionOptions(), heads=2)),
        molecules,
        "SE(3)",
    ),
    **{
        f"attentive_{kind}": (
            partial(AttentiveResNet, dihedral(4), 1, 2, blocks=1, channels=(3, 4, 4), attention=kind),
            lambda: images(8),
            "D4",
        )
        for kind in ("none", "channel", "spatial", "input")
    },
    "attentive_voxels": (
        lambda: AttentiveResNet(tetrahedral(), 1, 2, blocks=1, channels=(2, 3, 3), attention="input", spatial_size=3),
        lambda: torch.rand(2, 1, 4, 4, 4),
        "T",
    ),
    **{
        f"affine_{layer}": (
            partial(AffineSelfConvNet, dihedral(4), 1, 2, layer=layer, **(AFFINE if layer != "convolution" else SMALL)),
            lambda: images(8),
            "D4",
        )
        for layer in ("simple", "stand-alone", "convolution")
    },
}
# Other rows have the same classes with other outputs, frames or distances.
VARIANTS = set(
    "directions framewise_vector framewise_bonds tfn_vector tfn_periodic tfn_cubes_within distances_vector lie_finite "
    "lie_mirrors lie_similar lie_similar_vectors lie_directions_vectors gsa_directions_vectors lie_published_logs "
    "direction_cubes forces forces_principal forces_several field_vector field_position field_dipole "
    "field_tensor".split()
)


def firsts(clouds: list[Data]) -> list[Data]:
    """Return the same clouds with only one feature."""
    for cloud in clouds:
        cloud.x = cloud.x[:, :1]
    return clouds


# Rows that differ from others in their symmetry alone, or whose layers, frames and heads are also those of others.
OTHER_SYMMETRIES = set(
    "gsa_squares gsa_published gsa_dilated gsa_global finite_se2_squares lie_squares framewise_squares tfn_cubes "
    "framewise_square_messages framewise_square_cutoff direction_cubes_principal lie_plane lie_turns lie_similar3 "
    "lie_dilations affine_strided directions_improper framewise_posed_Oh gsa_points gsa_coordinates gsa_absolute "
    "framewise_principal framewise_principal_vector framewise_posed_O directions_posed lie_vectors lie_orbits "
    "lie_scales lie_vector_finite lie_conv lie_conv_vector field_rotation field_tensor_principal field_lie "
    "gsa_principal_vector attentive_none attentive_channel affine_simple affine_stand-alone fields_attentive "
    "fields_framewise fields_principal fields_spins fields_directions fields_lie fields_tfn fields_distances "
    "fields_image lie_proper lie_proper_pose attentive_squares image_window".split()
) | {*ABOUT_ORIGIN, *OF_PERMUTED}
DIRECTED = ("lie_directions", "lie_directions_vectors", "gsa_directions_vectors")
# Properties that a network does not promise, and why.
EXCEPT = {
    **{f"{name} equivariance": "needs kinds, tested below" for name in DIRECTED},
    **{f"{name} half": "rounding leaves the space" for name in (*DIRECTED, "lie_sphere")},
    **{
        f"finite_se2_squares {way}": "the search for neighbors is not part of its geometry"
        for way in ("compile", "export")
    },
    "hamiltonian training": "a constant added to the potential has no effect",
    "hamiltonian continuity": "integrates at each of hundreds of evaluations",
}
UNCOMPILED = {
    **dict.fromkeys(
        "stresses forces forces_principal forces_several hamiltonian origin_forces".split(), "outputs are derivatives"
    ),
    **dict.fromkeys(
        "attentive_all_cnn attentive_vectors affine_vectors fields_image permuted_image".split(),
        "pixels are sorted as in an image, which depends on values",
    ),
}
# Heads of vectors and scales switch autocast off around a product with the frames.
EXCEPT |= {
    f"{name} export": "torch saves but does not load programs with a region without autocast"
    for name in "framewise_vector framewise_point framewise_separable field_vector field_position field_dipole "
    "field_several field_tensor field_rotation gsa_vectors gsa_scales lie_vector_finite lie_conv_vector "
    "attentive_points_input fields_gsa fields_attentive fields_framewise fields_directions".split()
}
EXCEPT |= {f"{name} {way}": why for name, why in UNCOMPILED.items() for way in ("compile", "export")}
# A network of each class, for properties that do not depend on options.
OF_CLASSES = set(
    "framewise directions_bonds tfn se3_transformer distances gsa_images lie_principal lie_conv_thinned finite_se2 "
    "stresses field_several attentive_cnn attentive_all_cnn attentive_resnet attentive_densenet affine rescaled "
    "ensemble hamiltonian".split()
)
# Those of slow properties that run without being asked for.
QUICK = {
    "save": OF_CLASSES,
    "repeats": OF_CLASSES,
    "compile": {"framewise", "affine_field"},  # test_compile.py has distances and directions
    "export": {"distances", "image_points"},  # docs/taking_it_away.md has images
    "continuity": {"framewise", "finite_se2", "distances_vector"},
}


@cache
def made(name):
    """Return the network and data of a row, with random weights."""
    make, data, _ = NETWORKS[name]
    torch.manual_seed(0)
    return randomize(make(), spread=0.4), data()


def cases():
    for name, wanted in product(NETWORKS, PROPERTIES):
        quick = name in QUICK.get(wanted, NETWORKS.keys() - VARIANTS)
        quick = quick and (name not in OTHER_SYMMETRIES or wanted == "equivariance")
        if f"{name} {wanted}" not in EXCEPT:
            yield pytest.param(name, wanted, marks=() if quick else pytest.mark.slow)


@pytest.mark.filterwarnings("ignore::lieattn.geometry.DegenerateFramesWarning")
@pytest.mark.parametrize(("name", "wanted"), cases())
def test_every_network_has_every_property(name, wanted):
    reason = PROPERTIES[wanted](*made(name))
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_state_their_symmetry(name):
    network = made(name)[0]
    assert network.symmetry.group.name == NETWORKS[name][2]
    assert network.symmetry.name in network.guarantee


@pytest.mark.parametrize("name", ABOUT_ORIGIN)
def test_certificates_about_an_origin_see_translations(name):
    network, data = made(name)
    options = {"continuity": False, "dtypes": (torch.float64,), "elements": 3, "rotations": 1}
    certificate = assert_certified(network, data, **options)
    group = f"{ABOUT_ORIGIN[name][2]} about the origin"
    assert certificate.group == group
    assert group in certificate.guarantee
    assert certificate.worst()["float64"] < 1e-10 * max(1, certificate.spread)
    shifted = [row for row in certificate.rows if row.label == f"translation, outside of {group}"]
    assert shifted
    assert all(row.max_error > 1e-3 and row.passed is None for row in shifted)


def test_positions_as_inputs_are_moved_as_positions():
    """Control: they were moved as vectors, so that a claim of translations passed."""
    network, data = made("origin_framewise")
    certificate = certify(network, data, octahedral(), continuity=False, dtypes=(torch.float64,))
    assert certificate.verdict == "failed"
    assert "translation: first broken" in str(certificate)
    found = certify(network, data, "search", continuity=False, dtypes=(torch.float64,))
    assert found.group == "O"


@pytest.mark.parametrize("name", OF_PERMUTED)
def test_channels_that_are_permuted_wrongly_are_noticed(name):
    """Control: certificates fail if the channels do not move."""
    network, data = made(name)
    options = {"elements": 2, "rotations": 0, "continuity": False, "dtypes": (torch.float64,)}
    with pytest.raises(AssertionError):
        assert_certified(network, data, inputs={OF_PERMUTED[name][2]: "invariant"}, **options)


def test_motions_that_do_not_permute_channels_are_not_tried():
    network, data = made("permuted_subgroup")
    rows = certify(network, data, continuity=False, dtypes=(torch.float64,)).rows
    assert {row.label for row in rows if row.check == "outside"} == {
        *("element of C4, outside of C2", "element of D2, outside of C2", "element of D4, outside of C2"),
    }


@pytest.mark.parametrize("name", DIRECTED)
def test_positions_with_directions(name):
    options = {"elements": 1, "rotations": 0, "continuity": False}
    assert_certified(*made(name), inputs={"pos": ("position", "vector")}, **options)


@pytest.mark.parametrize("name", OF_FIELDS)
def test_a_pseudovector_taken_as_a_vector_is_noticed(name):
    make, dim, _ = OF_FIELDS[name]
    right = FIELDS[2 if dim == "pixels" else dim]
    torch.manual_seed(0)
    network = randomize(make({**right, "spin": Vector(3) if dim == 3 else Scalar()}), spread=0.4)
    options = {"elements": 2, "rotations": 0, "continuity": False, "dtypes": (torch.float64,)}
    with pytest.raises(AssertionError):
        assert_certified(network, of_fields(name, dim), inputs={"spin": right["spin"]}, **options)


# --- controls: networks with one fault ------------------------------------------------------------------------


class Own(nn.Module):
    """A network of a user, invariant to all motions of the plane."""

    symmetry = E(2)
    jumps = ()

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))

    def seen(self, data: Batch) -> torch.Tensor:
        """Return the numbers of each pair: features of the second point, and a window of their distance."""
        squares = (data.pos[:, None] - data.pos).square().sum(dim=2)
        return torch.stack([data.x[:, 0].expand(len(squares), -1), torch.exp(-squares)], dim=2)

    def forward(self, data: Batch) -> torch.Tensor:
        alike = (data.batch[:, None] == data.batch).to(data.pos)
        pairs = torch.tanh(self.mlp(self.seen(data))) * self.seen(data)[..., 1:] * alike[..., None]
        return pairs.new_zeros(data.num_graphs, 3).index_add(0, data.batch, pairs.sum(dim=1))


def fault(after=None, before=None, seen=None, **attributes):
    """Return the network with a change of the outputs, ``after(self, data, outputs)``, the data, or of the pairs."""

    class Faulty(Own):
        def seen(self, data):
            found = super().seen(data)
            return found if seen is None else seen(self, data, found)

        def forward(self, data):
            data = data if before is None else before(self, data)
            out = super().forward(data)
            return out if after is None else after(self, data, out)

    Faulty.__name__ = Faulty.__qualname__ = "Faulty"
    globals()["Faulty"] = Faulty  # where a pickle looks for it
    network = randomize(Faulty(), spread=0.4)
    for name, value in attributes.items():
        setattr(network, name, value)
    return network


def window(self, data, found):
    """A window with a jump at a distance of 1."""
    return torch.where(found > 0.3679, found, torch.zeros_like(found))


def remembering(self, data, out):
    """Adds a running mean that is no part of the state."""
    self.mean = getattr(self, "mean", 0.0)
    if self.training:
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean()
    return out + self.mean


def counting(self, data, out):
    self.count.add_(1)
    return out


def with_buffer(self, data, out):
    if self.training:
        self.mean.add_(out.detach().mean())
    return out + self.mean


def in_place(self, data):
    data.pos -= 1.0
    return data


def distances(self, data, found):
    return torch.stack([found[..., 0], torch.exp(-(data.pos[:, None] - data.pos).square().sum(dim=2).sqrt())], dim=2)


class HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 0.5 * grad


def buffered(network, persistent):
    network.register_buffer("mean", torch.zeros(()), persistent=persistent)
    return network


def counted(network):
    network.register_buffer("count", torch.zeros(()))
    return network


def unused(network):
    network.unused = nn.Parameter(torch.ones(()))
    return network


def clouds_of_plane():
    return [Data(x=cloud.x[:, :1].double(), pos=cloud.pos) for cloud in molecules(2)]


CONTROLS = {
    "equivariance": {
        "axis": lambda: fault(seen=lambda self, data, found: found + data.pos[:, :1, None]),
        "mirror": lambda: fault(after=lambda self, d, out: out + torch.sin(d.pos[0, 0] * d.pos[1, 1])),
        "constant": lambda: fault(after=lambda self, data, out: torch.ones_like(out)),
        "not a number": lambda: fault(after=lambda self, data, out: out * torch.nan),
    },
    "continuity": {"window": lambda: fault(seen=window)},
    "batches": {
        "mean of the batch": lambda: fault(after=lambda self, data, out: out - data.x.mean()),
        "place in the batch": lambda: fault(after=lambda self, d, out: out + torch.arange(len(out))[:, None]),
        "size of the batch": lambda: fault(after=lambda self, data, out: out / len(out)),
    },
    "order": {
        "first point": lambda: fault(after=lambda self, data, out: out + data.x[data.ptr[:-1]]),
        "sum of those before": lambda: fault(seen=lambda self, data, found: found * found.cumsum(dim=1)),
    },
    "precision": {
        "wide": lambda: fault(after=lambda self, data, out: out.double()),
        "half inside": lambda: fault(seen=lambda self, d, f: f.bfloat16().float() if f.dtype == torch.float32 else f),
    },
    "autocast": {
        "rounded": lambda: fault(seen=lambda self, d, f: f * torch.sin(999 * d.pos @ d.pos.mT)[..., None].to(f)),
        "overflow": lambda: fault(after=lambda self, data, out: out / (torch.is_autocast_enabled("cpu") - 1)),
    },
    "half": {"small": lambda: fault(after=lambda self, data, out: out + (out + 1000) - 1000)},
    "compile": {"number": lambda: fault(after=lambda self, data, out: out * 2 if out.sum() > 0 else out)},
    "export": {"number": lambda: fault(after=lambda self, data, out: out * float(out.sum()))},
    "save": {
        "attribute": lambda: fault(after=remembering),
        "buffer": lambda: buffered(fault(after=with_buffer), False),
        "no pickle": lambda: fault(activation=lambda x: x),
    },
    "degenerate": {
        "distances": lambda: fault(seen=distances),
        "mean of others": lambda: fault(
            after=lambda self, data, out: out / (torch.bincount(data.batch, minlength=len(out)) - 1)[:, None]
        ),
        "empty": lambda: fault(after=lambda self, d, out: out / torch.bincount(d.batch, minlength=len(out))[:, None]),
    },
    "gradients": {
        "backward": lambda: fault(after=lambda self, data, out: HalfGradient.apply(out)),
        "detached": lambda: fault(seen=lambda self, data, f: torch.stack([f[..., 0], f[..., 1].detach()], 2)),
    },
    "training": {
        "unused": lambda: unused(fault()),
        "not finite": lambda: fault(after=lambda self, data, out: out + (0 * self.mlp[0].weight.sum()).sqrt()),
    },
    "repeats": {
        "dropout": lambda: fault(after=lambda self, data, out: nn.functional.dropout(out, 0.5)),
        "counts": lambda: counted(fault(after=counting)),
        "data": lambda: fault(before=in_place),
        "without gradients": lambda: fault(after=lambda self, d, out: out if torch.is_grad_enabled() else out + 1),
    },
}


@pytest.mark.parametrize("wanted", PROPERTIES)
def test_a_network_of_a_user_conforms(wanted):
    assert assert_conforms(fault(), clouds_of_plane(), [wanted]).keys() <= {"device"}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("wanted", "name"), [(wanted, name) for wanted in CONTROLS for name in CONTROLS[wanted]])
def test_controls_fail_the_property_they_lack(wanted, name):
    with pytest.raises((AssertionError, RuntimeError, AttributeError)):
        PROPERTIES[wanted](CONTROLS[wanted][name](), clouds_of_plane())


def test_properties_have_controls_and_names():
    assert CONTROLS.keys() == PROPERTIES.keys() - {"device"}  # tests/test_gpu.py
    with pytest.raises(ValueError, match=r"properties: expected names among equivariance, .*, got speed"):
        assert_conforms(fault(), clouds_of_plane(), ["order", "speed"])
    branching = fault(after=lambda self, data, out: out if data.pos.sum() > 0 else out + 0)
    with pytest.raises(AssertionError, match=r"^compile: Unsupported: Data-dependent branching"):
        assert_conforms(branching, clouds_of_plane(), {"compile", "order"})
    images_only = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    reasons = assert_conforms(images_only, images(4), ["equivariance", "order", "degenerate", "batches", "repeats"])
    raster = "pixels, of images or of data with grid, are a raster; without grid they are checked as points"
    assert reasons == {"equivariance": "the network states no symmetry", "order": raster, "degenerate": raster}
