"""SchNet, PaiNN, EGNN, NequIP and MACE, from published packages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ._base import KINDS, FeaturePeer, Points


class SchNet(FeaturePeer):
    """SchNet of schnetpack (Schütt et al. 2017): convolutions with filters that depend on the distance."""

    directed = False

    def __init__(self, width: int = 48, *, layers: int = 4, basis: int = 20, **options: Any) -> None:
        _let_schnetpack_import()
        from schnetpack.nn import CosineCutoff, GaussianRBF
        from schnetpack.representation import SchNet as Network

        super().__init__(width, **options)
        radius = self.neighborhood.radius
        self.network = Network(width, layers, GaussianRBF(basis, radius), CosineCutoff(radius), max_z=KINDS)
        self.make_head(width, 0)

    def features(self, points: Points) -> tuple[Tensor, Tensor | None]:
        """Return the features of the last interaction."""
        return self.network(_schnetpack_inputs(points))["scalar_representation"], None


class PaiNN(FeaturePeer):
    """PaiNN of schnetpack (Schütt, Unke and Gastegger 2021): messages of numbers and vectors.

    The vector features are initialized with vector inputs, if there are any, instead of zeros.
    """

    takes_vectors = True

    def __init__(self, width: int = 32, *, layers: int = 3, basis: int = 20, **options: Any) -> None:
        _let_schnetpack_import()
        from schnetpack.nn import BesselRBF, CosineCutoff
        from schnetpack.representation import PaiNN as Network

        super().__init__(width, **options)
        radius = self.neighborhood.radius
        self.network = Network(width, layers, BesselRBF(basis, radius), CosineCutoff(radius), max_z=KINDS)
        self.start = nn.Linear(len(self.vector_inputs), width, bias=False) if self.vector_inputs else None
        self.make_head(width, width)

    def features(self, points: Points) -> tuple[Tensor, Tensor | None]:
        """Return the features of the last block."""
        network = self.network
        if self.start is None:
            found = network(_schnetpack_inputs(points))
            return found["scalar_representation"], found["vector_representation"]
        # The layers are called one by one, since the forward method of the network starts from zeros.
        lists, length = points.lists, points.between.norm(dim=1, keepdim=True)
        filters = network.filter_net(network.radial_basis(length)) * network.cutoff_fn(length)[..., None]
        x, v = network.embedding(points.kinds)[:, None], self.start(points.given.transpose(1, 2))
        blocks = zip(network.interactions, network.mixing, filters.split(3 * self.width, dim=-1), strict=True)
        for interaction, mixing, weights in blocks:
            x, v = interaction(x, v, weights, points.between / length, lists.target, lists.source, len(x))
            x, v = mixing(x, v)
        return x[:, 0], v


class EGNN(FeaturePeer):
    """EGNN of egnn-pytorch (Satorras et al. 2021): the points move, and their displacement is the directed feature.

    The package does not support velocities. The lengths of vector inputs are features of points, and their inner
    products with x_source - x_target are features of edges.
    """

    takes_vectors = True

    def __init__(
        self, width: int = 32, *, layers: int = 4, messages: int | None = None, steps: float = 0.1, **options: Any
    ) -> None:
        from egnn_pytorch.egnn_pytorch_geometric import EGNN_Sparse

        super().__init__(width, **options)
        count, moves = len(self.vector_inputs), self.kind == "vector"
        self.embedding = nn.Embedding(KINDS, width)
        self.lengths = nn.Linear(count, width, bias=False) if count else None
        sizes: dict[str, Any] = {"m_dim": messages or width, "edge_attr_dim": 2 * count, "soft_edge": 1}
        sizes |= {"norm_coors_scale_init": steps}
        self.layers = nn.ModuleList(
            EGNN_Sparse(width, update_coors=moves, norm_coors=moves, **sizes) for _ in range(layers)
        )
        self.make_head(width, 1)

    def features(self, points: Points) -> tuple[Tensor, Tensor | None]:
        """Return the features of the last layer."""
        edges, given = points.lists.edge_index, points.given
        x = self.embedding(points.kinds)
        if self.lengths is not None:
            x = x + self.lengths(given.norm(dim=2))
        ends = [given[edges[0]], given[edges[1]]]
        along = torch.cat([(end * points.between[:, None]).sum(dim=2) for end in ends], dim=1)
        state = torch.cat([points.pos, x], dim=1)
        for layer in self.layers:
            state = layer(state, edges, edge_attr=along if self.vector_inputs else None, batch=points.clouds.batch)
        return state[:, 3:], (state[:, :3] - points.pos)[:, :, None]


class NequIP(FeaturePeer):
    """The layers of NequIP (Batzner et al. 2022) from nequip: tensor product convolutions with gates.

    ``NequIPGNNModel`` of the package returns energies. Here its modules return scalars and vectors of the points.

    Parameters
    ----------
    degree
        Largest degree of features and harmonics.
    embedding
        Number of channels of the embedded kinds.
    radial
        Number of hidden units of the radial networks.
    neighbors
        Mean number of neighbors. Sums are divided by its square root.
    """

    takes_vectors = True

    def __init__(
        self,
        width: int = 16,
        *,
        layers: int = 3,
        degree: int = 2,
        embedding: int = 8,
        radial: int = 32,
        neighbors: float = 10.0,
        **options: Any,
    ) -> None:
        from e3nn import o3
        from nequip.nn import ApplyFactor, ConvNetLayer
        from nequip.nn.embedding import (
            BesselEdgeLengthEncoding,
            EdgeLengthNormalizer,
            NodeTypeEmbed,
            PolynomialCutoff,
            SphericalHarmonicEdgeAttrs,
        )

        super().__init__(width, **options)
        names = [f"K{number}" for number in range(KINDS)]
        self.embed = NodeTypeEmbed(names, embedding)
        harmonics = SphericalHarmonicEdgeAttrs(degree, irreps_in=self.embed.irreps_out)
        lengths = EdgeLengthNormalizer(self.neighborhood.radius, names, irreps_in=harmonics.irreps_out)
        bessel = BesselEdgeLengthEncoding(PolynomialCutoff(6), irreps_in=lengths.irreps_out)
        factor = ApplyFactor("edge_embedding", 2 * math.pi / self.neighborhood.radius**2, irreps_in=bessel.irreps_out)
        modules: list[Any] = [harmonics, lengths, bessel, factor]
        irreps = dict(factor.irreps_out)
        if self.vector_inputs:
            irreps["node_features"] = irreps["node_features"] + o3.Irreps(f"{len(self.vector_inputs)}x1o")
        hidden = [f"{width}x{number}{'eo'[number % 2]}" for number in range(degree + 1)]
        for number in range(layers):
            last = hidden[: 2 if self.kind == "vector" else 1]
            modules.append(
                ConvNetLayer(
                    irreps,
                    " + ".join(hidden if number < layers - 1 else last),
                    convolution_kwargs={
                        "radial_mlp_width": radial,
                        "use_sc": number > 0,
                        "is_first_layer": number == 0,
                        "avg_num_neighbors": neighbors,
                        "type_names": names,
                    },
                )
            )
            irreps = modules[-1].irreps_out
        self.layers = nn.ModuleList(modules)
        self.make_head(width, width)

    def features(self, points: Points) -> tuple[Tensor, Tensor | None]:
        """Return the features of the last layer."""
        lists = points.lists
        data = {
            "pos": points.pos,
            "atom_types": points.kinds,
            "edge_index": torch.stack([lists.target, lists.source]),
            "edge_vectors": points.between,
            "batch": points.clouds.batch,
        }
        data = self.embed(data)
        data["node_features"] = torch.cat([data["node_features"], points.given.flatten(1)], dim=1)
        for layer in self.layers:
            data = layer(data)
        x = data["node_features"]
        # e3nn has the coordinates of vectors in the order of positions.
        return x[:, : self.width], x[:, self.width :].unflatten(1, (-1, 3)).transpose(1, 2)


class MACE(FeaturePeer):
    """MACE of mace-torch (Batatia et al. 2022): many-body products.

    Numbers are outputs of its own read-outs, and vectors are computed from its features. The package pins e3nn 0.4.4,
    so it needs a separate environment.

    Parameters
    ----------
    degree, correlation
        Largest degree of harmonics, and number of factors of the products.
    species
        Kinds that occur.
    radial
        Number of hidden units of the radial networks.
    neighbors
        Mean number of neighbors. Sums are divided by it.
    """

    species: Tensor

    def __init__(
        self,
        width: int = 16,
        *,
        layers: int = 2,
        degree: int = 2,
        correlation: int = 2,
        species: Sequence[int] = (1, 6, 7, 8),
        radial: int = 16,
        neighbors: float = 10.0,
        **options: Any,
    ) -> None:
        import numpy as np
        from mace import modules  # imported first, since e3nn 0.4.4 can read its own constants only after this import

        from e3nn import o3  # isort: skip

        super().__init__(width, **options)
        block = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
        self.network = modules.MACE(
            r_max=self.neighborhood.radius,
            num_bessel=8,
            num_polynomial_cutoff=5,
            max_ell=degree,
            interaction_cls=block,
            interaction_cls_first=block,
            num_interactions=layers,
            num_elements=len(species),
            hidden_irreps=o3.Irreps(f"{width}x0e + {width}x1o"),
            MLP_irreps=o3.Irreps(f"{width}x0e"),
            atomic_energies=np.zeros(len(species)),
            avg_num_neighbors=neighbors,
            atomic_numbers=list(species),
            correlation=correlation,
            gate=nn.functional.silu,
            radial_MLP=[radial],
            keep_last_layer_irreps=self.kind == "vector",
        )
        self.register_buffer("species", torch.tensor(list(species)), persistent=False)
        if self.kind == "vector":
            self.make_head(width, width)

    def _found(self, points: Points) -> dict[str, Tensor]:
        lists, clouds = points.lists, points.clouds
        none = points.pos.new_zeros(lists.num_edges, 3)
        batch = {
            "positions": points.pos.clone(),  # a copy, since the package makes it require gradients
            "node_attrs": (points.kinds[:, None] == self.species).to(points.pos),
            "edge_index": lists.edge_index,
            "shifts": none,
            "unit_shifts": none,
            "cell": points.pos.new_zeros(3 * clouds.num_clouds, 3),
            "batch": clouds.batch,
            "ptr": nn.functional.pad(clouds.counts.cumsum(0), (1, 0)),
        }
        return cast(dict[str, Tensor], self.network(batch, training=self.training, compute_force=False))

    def features(self, points: Points) -> tuple[Tensor, Tensor | None]:
        """Return the features of the last layer."""
        x = self._found(points)["node_feats"][:, -4 * self.width :]
        return x[:, : self.width], x[:, self.width :].unflatten(1, (-1, 3)).transpose(1, 2)

    def outputs(self, points: Points) -> Tensor:
        """Return energies of the atoms, or vectors."""
        if self.kind == "vector":
            return super().outputs(points)
        return self._found(points)["node_energy"][:, None]


def _let_schnetpack_import() -> None:
    """Restore a name in torch that schnetpack 2.2 imports for annotations, and that torch 2.13 has removed."""
    from torch.utils.data import dataloader

    if not hasattr(dataloader, "T_co"):
        vars(dataloader)["T_co"] = TypeVar("T_co", covariant=True)


def _schnetpack_inputs(points: Points) -> dict[str, Tensor]:
    import schnetpack.properties as names

    lists = points.lists
    return {names.Z: points.kinds, names.Rij: points.between, names.idx_i: lists.target, names.idx_j: lists.source}
