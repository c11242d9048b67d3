"""Meshes and shapes of lieattn_datasets, with files that the tests write."""

import codecs
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch
from torch_geometric.loader import DataLoader

import lieattn_datasets as ld
from lieattn.groups import octahedral
from lieattn.nn import act_on_grid, grid_images
from lieattn_datasets import _procedural, _shapes
from lieattn_datasets._splits import SPLITS, frozen_stream

trimesh = pytest.importorskip("trimesh", reason="meshes need trimesh")

RANDOM = np.random.default_rng(5)
CORNERS = [(x, y, z) for x in (0, 1) for y in (0, 1) for z in (0, 1)]
SQUARES = [(0, 1, 3, 2), (4, 6, 7, 5), (0, 4, 5, 1), (2, 3, 7, 6), (0, 2, 6, 4), (1, 5, 7, 3)]


def off(header="OFF\n", corners=CORNERS, squares=SQUARES, faces=None):
    lines = [" ".join(map(str, corner)) for corner in corners]
    lines += [f"{len(square)} " + " ".join(map(str, square)) for square in squares]
    return (f"{header}{len(corners)} {faces or len(squares)} 0\n" + "\n".join(lines) + "\n").encode()


def polygon_file(kind, places, polygons):
    """Return the content of a file with these polygons: ``"off"``, ``"obj"``, ``"ply"`` or ``"ply binary"``."""
    corners = [" ".join(map(repr, map(float, place))) for place in places]
    faces = [" ".join(map(str, polygon)) for polygon in polygons]
    if kind == "obj":
        lines = [f"v {corner}" for corner in corners]
        return "\n".join([*lines, *("f " + " ".join(str(k + 1) for k in polygon) for polygon in polygons), ""]).encode()
    if kind == "off":
        return off(corners=places.tolist(), squares=polygons)
    form = "binary_little_endian" if kind == "ply binary" else "ascii"
    header = (
        f"ply\nformat {form} 1.0\nelement vertex {len(places)}\n"
        "property double x\nproperty double y\nproperty double z\n"
        f"element face {len(polygons)}\nproperty list int int vertex_indices\nend_header\n"
    )
    if form == "ascii":
        rows = [f"{len(polygon)} {face}" for polygon, face in zip(polygons, faces, strict=True)]
        return (header + "\n".join([*corners, *rows, ""])).encode()
    rows = [np.array([len(polygon), *polygon], dtype="<i4").tobytes() for polygon in polygons]
    return header.encode() + places.astype("<f8").tobytes() + b"".join(rows)


def newell(places, polygon):
    """Return the mean normal of a polygon, whose length is its area."""
    ring = places[list(polygon)] - places[polygon[0]]
    return np.cross(ring, np.roll(ring, -1, axis=0)).sum(axis=0) / 2


def normals(vertices, faces):
    first, second, third = (vertices[faces[:, corner]] for corner in range(3))
    return np.cross(second - first, third - first) / 2


L = [(0, 0), (2, 0), (2, 1), (1, 1), (1, 2), (0, 2)]
STAR = [(2 * np.cos(angle), 2 * np.sin(angle)) for angle in 4 * np.pi / 5 * np.arange(5)]  # a pentagram
CROSSING = {
    "bow tie": [(0, 0), (1, 1), (1, 0), (0, 1)],
    "uneven bow tie": [(0, 0), (2, 2), (2, 0), (0, 1)],
    "pentagram": STAR,
    "arms through each other": [(0, 0), (4, 0), (4, 2), (1, 2), (1, 1), (3, 1), (3, 3), (0, 3)],
    "around its first corner": [(0, 0), *((np.cos(angle), np.sin(angle)) for angle in np.arange(8))],
}


class TestPolygons:
    """Concave polygons, in files of all kinds, are drawn in tests/fuzz/meshes.py."""

    @pytest.mark.parametrize("name", CROSSING)
    def test_polygons_that_cross_themselves(self, name):
        ring = np.pad(np.array(CROSSING[name], dtype=float), ((0, 0), (1, 0)))
        for start in range(len(ring)):
            polygons = [[0, 1, 2], np.roll(np.arange(len(ring)), start).tolist()]
            with pytest.raises(
                ld.MeshError, match=r"a\.obj cannot be read as a mesh: .*face 1 crosses itself, seen along"
            ):
                ld.read_mesh("a.obj", polygon_file("obj", ring, polygons))

    def test_polygons_that_are_not_planar(self):
        """They are divided as their projection along the mean normal: convex ones as fans, concave ones inside."""
        saddle = np.array([(0, 0, 0), (1, 0, 1), (1, 1, 0), (0, 1, 1)], dtype=float)
        assert ld.read_mesh("a.obj", polygon_file("obj", saddle, [range(4)]))[1].tolist() == [[0, 1, 2], [2, 3, 0]]
        dent = np.array([(0, 0, 0), (2, 1, 0.2), (0, 2, 0), (1, 1, 0.3)])
        for start in range(4):
            faces = ld.read_mesh("a.obj", polygon_file("obj", dent, [np.roll(range(4), start).tolist()]))[1]
            assert sorted(map(sorted, faces.tolist())) == [[0, 1, 3], [1, 2, 3]]

    def test_few_polygons_that_cross_themselves(self):
        """Production models have some twisted squares among many thousands; these become fans."""
        ring = np.array([(0, 0, 0), (1, 1, 0), (1, 0, 0), (0, 1, 0), (60, 0, 0), (0, 60, 0)])
        _, faces = ld.read_mesh("a.obj", polygon_file("obj", ring, [[0, 4, 5], [0, 1, 2, 3]]))
        assert faces.tolist() == [[0, 4, 5], [0, 1, 2], [2, 3, 0]]
        with pytest.raises(ld.MeshError, match=r"face 1 crosses itself, seen along its mean normal \(2 faces do\)"):
            ld.read_mesh("a.obj", polygon_file("obj", ring, [[0, 4, 5], [0, 1, 2, 3], [0, 1, 2, 3]]))

    def test_small_crossings_are_rounding(self):
        """Files with seven digits, and polygons of no area, are read."""
        flat = np.pad(np.array([*L, (0, 1), (1e-7, 1.2)], dtype=float), ((0, 0), (0, 1)))
        assert normals(*ld.read_mesh("a.obj", polygon_file("obj", flat, [range(8)]))).sum(axis=0)[2] == pytest.approx(3)
        line = np.array([(0, 0, 0), (1, 1, 0), (2, 2, 0), (1, 1 + 1e-9, 0), (3, 0, 0)])
        vertices, faces = ld.read_mesh("a.obj", polygon_file("obj", line, [[0, 1, 2, 3], [3, 1, 2, 0], [0, 4, 2]]))
        assert np.linalg.norm(normals(vertices, faces), axis=1).sum() == pytest.approx(3)

    def test_what_concave_polygons_need(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "manifold3d", None)
        assert len(ld.read_mesh("a.off", off())[1]) == 12
        places = np.pad(np.array(L, dtype=float), ((0, 0), (0, 1)))
        with pytest.raises(
            ImportError, match=r'concave faces needs the package manifold3d: pip install "lieattn\[data\]"'
        ):
            ld.read_mesh("a.obj", polygon_file("obj", places, [[1, 2, 3, 4, 5, 0]]))

    @pytest.mark.parametrize("kind", ["off", "obj", "ply", "ply binary"])
    def test_vertices_that_do_not_exist(self, kind):
        places = np.array([(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0)], dtype=float)
        for wrong in (4, -7):
            with pytest.raises(ld.MeshError, match=r"face 1: expected vertices in 0 \.\. 3, got \[0, 1, 2, -?\d\]"):
                ld.read_mesh(f"a.{kind[:3]}", polygon_file(kind, places, [[0, 1, 2], [0, 1, 2, wrong]]))


SQUARE = "v 0 0 0\nv 1 0 0\nv 1 1 0\nv 0 1 0\nf 1 2 3 4\n"
PLY = (
    "ply\nformat ascii 1.0\nelement vertex 4\nproperty float x\nproperty float y\nproperty float z\nelement face 1\n"
    "property list uchar int vertex_indices\nend_header\n0 0 0\n1 0 0\n1 1 0\n0 1 0\n4 0 1 2 3\n"
)
FACETS = [
    "facet normal 0 0 1\nouter loop\nvertex 0 0 0\n"
    + "".join(f"vertex {x} {y} 0\n" for x, y in ends)
    + "endloop\nendfacet\n"
    for ends in ([(1, 0), (1, 1)], [(1, 1), (0, 1)])
]
STL = f"solid a\n{''.join(FACETS)}endsolid a\n"
SQUARES_OF = {
    "obj indented, with blank lines": "\n  " + SQUARE.replace("\n", "\r\n\r\n  "),
    "obj old line breaks": SQUARE.replace("\n", "\r"),
    "obj continued": SQUARE.replace("1 2 3", "1 \\\n 2\\\r\n3").replace("v 1 1 0", "v 1 \\\n1 0"),
    "obj interleaved": "v 0 0 0\nv 1 0 0\nv 1 1 0\nf -3 -2 -1\nv 0 1 0\nf -4 -2 -1\n",
    "obj further indices": "vt 0 0\nvn 0 0 1\n" + SQUARE.replace("1 2 3 4", "1/1/1 2//1 3/1 4/"),
    "obj colors": SQUARE.replace(" 0\n", " 0 0.5 0.5 0.5\n"),
    "obj lines and points": SQUARE + "l 1 2\np 1 2\nvp 1 2\n",
    "ply vertex_idx": PLY.replace("vertex_indices", "vertex_idx"),
    "ply int64": PLY.replace("uchar int", "uint64 int64").replace("float", "double"),
    "ply names with numbers": PLY.replace("uchar int", "uint8 int32").replace("float", "float32"),
    "ply texture first": PLY.replace("property list", "property list uchar float uv\nproperty list", 1).replace(
        "4 0 1", "2 0.5 0.5 4 0 1"
    ),
    "ply another list": PLY.replace("end_header", "property list uchar int groups\nend_header").replace(
        "2 3\n", "2 3 0\n"
    ),
    "ply colors": PLY.replace("float z", "float z\nproperty uchar red").replace(" 0\n", " 0 255\n"),
    "ply faces first": "ply\nformat ascii 1.0\nelement face 1\nproperty list uchar int vertex_indices\n"
    "element vertex 4\nproperty float x\nproperty float y\nproperty float z\nend_header\n"
    "4 0 1 2 3\n0 0 0\n1 0 0\n1 1 0\n0 1 0\n",
    "ply old line breaks": PLY.replace("\n", "\r"),
    "ply more numbers than stated": PLY.replace("2 3\n", "2 3 9 1 1 1\n"),
    "stl as it is": STL,
    "stl long names": STL.replace("solid a", "solid" + 100_000 * " ").replace("\n", " "),
    "stl no names": STL.replace("solid a", "solid"),
    "stl two solids": f"solid\n{FACETS[0]}endsolid\nsolid b\n{FACETS[1]}endsolid b\n",
    "off over several lines": "OFF\n4 1 0\n0 0 0\n1 0 0\n1 1 0\n0 1 0\n4 0 1\n2 # and\n\n3 255 0 0\n",
    "off old line breaks": "OFF\r4 1 0\r0 0 0\r1 0 0\r1 1 0\r0 1 0\r4 0 1 2 3\r",
    "off colors": "COFF\n4 1 0\n0 0 0 9 9 9\n1 0 0 9 9 9\n1 1 0 9 9 9\n0 1 0 9 9 9\n4 0 1 2 3 255 0 0 # red\n",
}
REFUSED = {
    "obj zero": (
        SQUARE.replace("1 2 3 4", "0 1 2 3"),
        "line 5: expected a face with corners that are counted from 1, got 0",
    ),
    "obj commas": (SQUARE.replace("v 1 0", "v 1,5 0"), "line 2: could not convert string to float: b'1,5'"),
    "obj flat": (SQUARE.replace("v 1 0 0", "v 1 0"), "line 2: not enough values"),
    "ply no list": (PLY.replace("list uchar int vertex_indices", "int a"), "expected one list of vertices .* got none"),
    "ply lists": (
        PLY.replace("vertex_indices", "a\nproperty list uchar int b").replace("2 3\n", "2 3 1 0\n"),
        "expected one list of vertices for each face, as vertex_indices, got a, b",
    ),
    "ply strips": (PLY.replace("element face", "element tristrips"), "it has strips of triangles, which are not read"),
    "ply no vertices": (PLY.replace("vertex 4", "points 4"), "it has faces, but no vertices with x, y and z"),
    "ply shorter row": (PLY.replace("1 1 0\n", "1 1\n"), "invalid column index 2"),
    "ply list in vertices": (
        PLY.replace("element face 1\n", ""),
        "a row of vertex has 3 numbers, fewer than its properties need",
    ),
    "ply types": (PLY.replace("uchar int", "uchar quad"), "the property vertex_indices has the unknown type quad"),
    "ply form": (PLY.replace("ascii", "zipped"), "not begin with the header of a PLY file, with one of its three"),
    "ply short row": (PLY.replace("4 0 1 2 3", "4 0 1 2"), "a row of face has 4 numbers, fewer than its properties"),
    "stl damaged": (STL.replace("1 0 0", "1 0", 1), "1 triangles can be read, but the rest begins with b'facet normal"),
    "stl damaged line": (STL.replace("1 0 0", "1 0", 1).replace("\n", " "), "1 triangles can be read, but the rest"),
    "stl no end": (STL.replace("endsolid a", ""), "2 triangles can be read, but it does not end with endsolid"),
    "stl words": (STL.replace("1 0 0", "1 x 0", 1), "could not convert string to float: .*'x'"),
    "off other dimensions": (off("4OFF\n").decode(), "header of an OFF file of text in three dimensions"),
}


class TestGrammar:
    """Other changes of a text that do not change its mesh are drawn in tests/fuzz/meshes.py."""

    @pytest.mark.parametrize("name", SQUARES_OF)
    def test_squares(self, name):
        vertices, faces = ld.read_mesh(f"a.{name[:3]}", SQUARES_OF[name].encode())
        assert len(faces) == 2
        np.testing.assert_allclose(normals(vertices, faces).sum(axis=0), [0, 0, 1])
        assert normals(vertices, faces)[:, 2].min() == 0.5

    @pytest.mark.parametrize("name", REFUSED)
    def test_reasons(self, name):
        content, message = REFUSED[name]
        with pytest.raises(ld.MeshError, match=rf"a\.{name[:3]} cannot be read as a mesh: ValueError: .*{message}"):
            ld.read_mesh(f"a.{name[:3]}", content.encode())

    @pytest.mark.parametrize("form", ["ascii", "binary_little_endian", "binary_big_endian"])
    def test_ply_without_vertices(self, form):
        content = PLY.replace("ascii", form).replace("vertex 4", "vertex 0").replace("face 1", "face 0")
        with pytest.raises(ld.MeshError, match=r"a\.ply has no faces, so it has no surface"):
            ld.read_mesh("a.ply", content[: content.index("0 0 0")].encode())


class TestReading:
    @pytest.mark.parametrize("suffix", ["off", "obj", "stl", "ply", "glb"])
    def test_formats(self, tmp_path, suffix):
        mesh = trimesh.creation.box(extents=(1, 2, 3))
        content = mesh.export(file_type=suffix)
        path = tmp_path / f"box.{suffix.upper()}"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        vertices, faces = ld.read_mesh(path)
        assert faces.shape == (12, 3)
        np.testing.assert_allclose(sorted(np.ptp(vertices, axis=0)), [1, 2, 3])
        pos, normal = ld.sample_surface(vertices, faces, 50, frozen_stream(0))
        assert ((pos * normal).sum(axis=1) > 0.4).all()  # outwards, whatever the format

    @pytest.mark.parametrize(
        "header", ["OFF\n", "OFF", "OFF ", "# a\nOFF\n", "OFF\n# a\n", "OFF\r\n", "COFF ", "\nOFF"]
    )
    def test_headers_of_off_files(self, header):
        vertices, faces = ld.read_mesh("elsewhere/cube.off", off(header))
        assert (len(vertices), len(faces)) == (8, 12)  # squares become triangles

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "not begin with the header of an OFF file"),
            (b"COFF\nx y z\n", "not begin with the header of an OFF file"),
            (off(faces=7), "14 lines for 8 vertices and 7 faces"),
            (off(faces=5), "14 lines for 8 vertices and 5 faces"),
            (b"OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n4 0 1 2\n", "a face has fewer corners than it states"),
            (off()[:60], "lines for 8 vertices and 6 faces"),
            (off(squares=[(0, 1, 9)]), "cannot be read as a mesh"),
            (off(corners=[(0, 0, 0), ("nan", 0, 0), (0, 1, 0)], squares=[(0, 1, 2)]), "cannot be read as a mesh"),
            (off(corners=[(0, 0, 0), (1, 0, 0), (2, 0, 0)], squares=[(0, 1, 2)]), "the area of the surface is zero"),
            (off(squares=[]), r"chair_0001\.off has no faces"),
        ],
    )
    def test_broken_files_are_named(self, content, message):
        with pytest.raises(ld.MeshError, match=message) as caught:
            ld.read_mesh("chair_0001.off", content)
        assert "chair_0001.off" in str(caught.value)

    def test_faces_of_obj_files(self):
        """Faces may span two lines. In a file that is cut off, they have too few corners, which trimesh ignores."""
        corners = b"v 0 0 0\nv 1 0 0\nv 0 1 0\nv 0 0 1\n"
        _, faces = ld.read_mesh("box.obj", corners + b"f 1 2 \\\n3\nf 2 3 4\n")
        assert faces.tolist() == [[0, 1, 2], [1, 2, 3]]
        for end, found in ((b"f 2 3", 2), (b"f 2/1 3/", 2), (b"f 2", 1), (b"f", 0), (b"f 2 \\\n3", 2)):
            message = f" line 6: expected a face with at least 3 corners, got {found}$"
            with pytest.raises(ld.MeshError, match=rf"chair\.obj cannot be read as a mesh: .*{message}"):
                ld.read_mesh("chair.obj", corners + b"f 1 2 3\n" + end)

    @pytest.mark.parametrize("suffix", ["off", "obj", "stl_ascii", "ply"])
    def test_byte_order_marks(self, suffix):
        mesh = trimesh.creation.box(extents=(1, 2, 3))
        content = mesh.export(file_type=suffix, **({"encoding": "ascii"} if suffix == "ply" else {}))
        content, name = content if isinstance(content, bytes) else content.encode(), f"box.{suffix.partition('_')[0]}"
        text = content.decode()
        for marked in (
            codecs.BOM_UTF8 + content,
            text.encode("utf-16"),
            codecs.BOM_UTF16_BE + text.encode("utf-16-be"),
        ):
            for found, wanted in zip(ld.read_mesh(name, marked), ld.read_mesh(name, content), strict=True):
                np.testing.assert_array_equal(found, wanted)

    @pytest.mark.parametrize("suffix", ["ply", "glb", "obj", "off"])
    def test_points_without_faces(self, suffix):
        """A scan of a surface is often stored as points alone; readers of meshes find nothing in it."""
        scan = trimesh.PointCloud(np.eye(3))
        contents = {"off": b"OFF\n3 0 0\n0 0 0\n1 0 0\n0 1 0\n", "obj": b"v 0 0 0\nv 1 0 0\nv 0 1 0\n"}
        contents |= {"ply": scan.export(file_type="ply"), "glb": trimesh.Scene(scan).export(file_type="glb")}
        with pytest.raises(ValueError, match=rf"scan\.{suffix} has no faces, so it has no surface; a cloud of points"):
            ld.read_mesh(f"scan.{suffix}", contents[suffix])

    def test_unknown_suffix(self):
        with pytest.raises(ld.MeshError, match=r"path: expected one that ends in \.off, .* got .*readme\.txt"):
            ld.read_mesh("readme.txt")


class TestSampling:
    def test_uniform_by_area(self):
        vertices = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 5], [3, 0, 5], [0, 3, 5]], dtype=float)
        faces = np.array([[0, 1, 2], [3, 4, 5]])
        pos, normal = ld.sample_surface(vertices, faces, 20_000, frozen_stream(1))
        assert (pos[:, 2] > 4).mean() == pytest.approx(0.9, abs=0.01)
        upper = pos[pos[:, 2] > 4][:, :2] / 3
        assert (upper >= 0).all()
        assert (upper.sum(axis=1) <= 1 + 1e-12).all()
        np.testing.assert_allclose(upper.mean(axis=0), 1 / 3, atol=0.01)
        np.testing.assert_allclose((upper**2).mean(axis=0), 1 / 6, atol=0.01)  # uniform on the triangle
        np.testing.assert_allclose(normal, np.tile([0.0, 0, 1], (20_000, 1)))

    def test_faces_without_area_get_no_points(self):
        vertices = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0]], dtype=float)
        faces = np.array([[0, 0, 1], [0, 1, 2], [2, 2, 2]])
        _, normal = ld.sample_surface(vertices, faces, 500, frozen_stream(2))
        np.testing.assert_array_equal(normal, np.tile([0.0, 0, 1], (500, 1)))

    @pytest.mark.parametrize(
        ("vertices", "faces", "points", "message"),
        [
            (np.zeros((3, 2)), [[0, 1, 2]], 1, r"vertices: expected \[vertices, 3\], got \[3, 2\]"),
            ([[0, 0, np.nan], *np.eye(3)[:2]], [[0, 1, 2]], 1, "vertices: expected finite numbers, got NaN"),
            (np.eye(3), [[0, 1]], 1, r"faces: expected \[faces, 3\]"),
            (np.eye(3), np.zeros((0, 3), int), 1, "at least one face"),
            (np.eye(3), [[0, 1, 3]], 1, "indices of vertices in 0 .. 2, got 0 .. 3"),
            (np.eye(3), [[0, 1, -1]], 1, "indices of vertices in 0 .. 2, got -1 .. 1"),
            (np.eye(3), [[0, 1, 2]], 0, "points: expected an integer of at least 1"),
        ],
    )
    def test_bad_input(self, vertices, faces, points, message):
        with pytest.raises(ValueError, match=message):
            ld.sample_surface(vertices, faces, points, frozen_stream(0))

    def test_unit_sphere(self):
        cloud = ld.normalize_cloud(RANDOM.normal(size=(30, 3)) * 7 + 100)
        np.testing.assert_allclose(cloud.mean(axis=0), 0, atol=1e-12)
        assert np.linalg.norm(cloud, axis=1).max() == pytest.approx(1)
        np.testing.assert_array_equal(ld.normalize_cloud([[3.0, 2, 1]]), [[0, 0, 0]])
        np.testing.assert_array_equal(ld.normalize_cloud(np.ones((4, 3))), np.zeros((4, 3)))


def small_shapes(**options):
    pos = RANDOM.normal(size=(5, 7, 3))
    normal = RANDOM.normal(size=(5, 7, 3))
    normal /= np.linalg.norm(normal, axis=-1, keepdims=True)
    return ld.ShapePoints(pos, normal, [0, 1, 2, 1, 0], ["a", "b", "c"], **options), pos, normal


class TestShapePoints:
    def test_tasks(self):
        shapes, pos, normal = small_shapes()
        data = shapes[3]
        assert data.y.tolist() == [1]
        np.testing.assert_allclose(data.pos, pos[3], rtol=1e-6)
        np.testing.assert_allclose(data.normal, normal[3], rtol=1e-6)
        shapes, pos, normal = small_shapes(task="normals")
        data = shapes[2]
        np.testing.assert_allclose(data.y, normal[2], rtol=1e-6)
        assert "normal" not in data
        assert data.label.tolist() == [2]
        assert shapes.vectors == ("pos", "y")
        assert ld.ShapePoints.vectors == ("pos", "normal")
        assert repr(shapes) == "ShapePoints(5 shapes of 7 points, 3 classes)"
        regression, *_ = small_shapes(targets=np.zeros((5, 2)))
        assert repr(regression) == "ShapePoints(5 shapes of 7 points, y [1, 2])"

    @pytest.mark.parametrize("rotate", ["none", "SO3"])
    def test_shapes_far_from_the_origin_keep_their_digits(self, rotate):
        """In projected coordinates of a map, 5,000 km from its origin, float32 has steps of 0.5 m."""
        near, pos, normal = small_shapes(rotate=rotate)
        far = ld.ShapePoints(pos + 5e6, normal, [0, 1, 2, 1, 0], ["a", "b", "c"], rotate=rotate)
        for one, other in zip(near, far, strict=True):
            assert (one.pos.dtype, other.pos.dtype) == (torch.float32, torch.float64)
            np.testing.assert_allclose(other.pos - other.pos.mean(dim=0), one.pos - one.pos.mean(dim=0), atol=2e-6)

    def test_rotations_are_evenly_distributed(self):
        shapes = ld.ShapePoints(np.zeros((400, 1, 3)), None, np.zeros(400, dtype=np.int64), ["one"], rotate="SO3")
        assert torch.cat([data.rotation for data in shapes]).mean(dim=0).abs().max() < 0.12  # four standard deviations

    @pytest.mark.parametrize("rotate", ["z", "SO3"])
    def test_rotations_are_kept(self, rotate):
        shapes, pos, normal = small_shapes(rotate=rotate, seed=3)
        turns = []
        for index, data in enumerate(shapes):
            turn = np.linalg.lstsq(pos[index], data.pos.double().numpy(), rcond=None)[0].T
            np.testing.assert_allclose(turn @ turn.T, np.eye(3), atol=1e-5)
            assert np.linalg.det(turn) > 0
            np.testing.assert_allclose(data.normal, normal[index] @ turn.T, atol=1e-5)
            np.testing.assert_allclose(data.rotation[0], turn, atol=1e-5)
            again = ld.RandomRotateFields(1)(data)
            np.testing.assert_allclose(again.pos, pos[index] @ again.rotation[0].T.numpy(), atol=1e-5)
            assert (abs(turn[2, 2] - 1) < 1e-5) == (rotate == "z")
            turns.append(turn)
        assert np.abs(turns[0] - turns[1]).max() > 0.1
        assert torch.equal(shapes.subset([4])[0].pos, shapes[4].pos)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"pos": np.zeros((2, 3))}, r"expected \[shapes, points, 3\]"),
            ({"labels": [0]}, r"expected \[shapes, points, 3\]"),
            ({"normal": np.zeros((2, 5, 3))}, r"normal: expected \[2, 4, 3\]"),
            ({"labels": [0, 2]}, r"labels: expected integers in 0 \.\. 1"),
            ({"normal": None, "task": "normals"}, "shapes without normals"),
            ({"targets": np.zeros((2, 1)), "task": "normals"}, "targets: expected None for task='normals'"),
            ({"task": "parts"}, "task: expected one of"),
            ({"rotate": "y"}, "rotate: expected one of"),
            ({"seed": -1}, "seed: expected an integer in 0"),
        ],
    )
    def test_bad_input(self, change, message):
        good = {"pos": np.zeros((2, 4, 3)), "normal": np.zeros((2, 4, 3)), "labels": [0, 1], "classes": ["a", "b"]}
        ld.ShapePoints(**good)
        with pytest.raises(ValueError, match=message):
            ld.ShapePoints(**{**good, **change})


def write_modelnet(root, name="ModelNet10", extra=None):
    folder = root / name
    files = {
        "bed/train/bed_0001.off": off("OFF"),
        "bed/train/bed_0002.off": off(),
        "bed/test/bed_0003.off": off(),
        "chair/train/chair_0001.off": off(corners=[(2 * x, y, z) for x, y, z in CORNERS]),
        "chair/test/chair_0002.off": off(),
        "chair/test/.DS_Store": b"junk",
        "chair/README.txt": b"junk",
        **(extra or {}),
    }
    for member, content in files.items():
        path = folder / member
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def pack(folder, target):
    with zipfile.ZipFile(target, "w") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.write(path, path.relative_to(folder.parent))
                archive.writestr(f"__MACOSX/{path.relative_to(folder.parent)}", b"junk")


class TestModelNet:
    def test_folder_and_archive_agree(self, tmp_path):
        folder = write_modelnet(tmp_path)
        (tmp_path / "packed").mkdir()
        pack(folder, tmp_path / "packed" / "ModelNet10.zip")
        for split, labels in (("train", [0, 0, 1]), ("test", [0, 1])):
            one = ld.ModelNet(tmp_path, split, points=64, verify=False)
            two = ld.ModelNet(tmp_path / "packed", split, points=64, verify=False)
            assert one.labels.tolist() == two.labels.tolist() == labels
            assert one.classes == two.classes == ("bed", "chair")
            for first, second in zip(one, two, strict=True):
                assert torch.equal(first.pos, second.pos)
                assert torch.equal(first.normal, second.normal)
                assert first.pos.norm(dim=1).max().item() == pytest.approx(1, rel=1e-5)
        batch = next(iter(DataLoader(one, batch_size=2)))
        assert batch.normal.shape == (128, 3)
        sizes = [len(ld.ModelNet(tmp_path, split, points=4, validation=1, verify=False)) for split in SPLITS]
        assert sizes == [2, 1, 2]  # all splits accept the same arguments

    def test_other_formats_in_a_folder(self, tmp_path):
        folder = tmp_path / "mine"
        for name, content in (("a/train/x.ply", "ply"), ("b/train/y.stl", "stl"), ("b/test/z.obj", "obj")):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            data = trimesh.creation.icosphere(subdivisions=1).export(file_type=content)
            path.write_bytes(data if isinstance(data, bytes) else data.encode())
        train = ld.MeshFolder(folder, points=100, task="normals")
        assert train.labels.tolist() == [0, 1]
        assert ((train[0].pos * train[0].y).sum(-1) > 0.7).all()
        assert ld.MeshFolder(folder, "test", points=3).classes == ("a", "b")

    def test_broken_meshes_are_all_named(self, tmp_path):
        folder = write_modelnet(
            tmp_path, extra={"bed/train/bed_0009.off": off()[:40], "chair/train/chair_0007.off": b"OFF"}
        )
        with pytest.raises(ValueError, match=r"2 of 5 files cannot be used: .*bed_0009\.off.*chair_0007\.off"):
            ld.ModelNet(tmp_path, verify=False)
        pack(folder, tmp_path / "ModelNet40.zip")
        with pytest.raises(
            ValueError, match=r"ModelNet40\.zip/ModelNet10/bed/train/bed_0009\.off cannot be read as a mesh"
        ):
            ld.ModelNet(tmp_path, version=40, verify=False)

    def test_what_is_missing(self, tmp_path):
        (tmp_path / "ModelNet10").mkdir()
        for error, call, message in (
            (FileNotFoundError, lambda: ld.ModelNet(tmp_path, version=40), r"needs the file ModelNet40\.zip"),
            (ValueError, lambda: ld.ModelNet(tmp_path, version=20), r"version: expected one of \(10, 40\), got 20"),
            (FileNotFoundError, lambda: ld.MeshFolder(tmp_path / "none"), "neither a folder nor a zip archive"),
            (FileNotFoundError, lambda: ld.ModelNet(tmp_path), r"no meshes or scans CLASS/train/\*"),
        ):
            with pytest.raises(error, match=message):
                call()
        (tmp_path / "ModelNet40.zip").write_bytes(b"not a zip")
        with pytest.raises(ValueError, match=r"ModelNet40\.zip is not a complete zip archive"):
            ld.ModelNet(tmp_path, version=40)


SCAN = {name: RANDOM.random(20).astype(np.float32) for name in ("x", "y", "z", "nx", "ny", "nz", "intensity")}
COLORS = RANDOM.integers(0, 256, (20, 3))
LABELS = np.arange(20) % 3


def scan_file(kind):
    """Return the content of a scan with normals, colors, intensity and labels."""
    table = np.stack([*SCAN.values(), *COLORS.T, LABELS], axis=1)
    names = [*SCAN, "red", "green", "blue", "label"]
    types = 7 * ["<f4"] + 3 * ["u1"] + ["<i4"]
    text = "\n".join(" ".join(f"{number:.9g}" for number in row) for row in table) + "\n"
    binary = np.rec.fromarrays(table.T, dtype=list(zip(names, types, strict=True))).tobytes()
    if kind.startswith("ply"):
        form = "ascii" if kind == "ply" else "binary_little_endian"
        properties = [
            f"property {dict(f='float', u='uchar', i='int')[t.strip('<')[0]]} {n}\n"
            for n, t in zip(names, types, strict=True)
        ]
        header = f"ply\nformat {form} 1.0\nelement vertex 20\n{''.join(properties)}end_header\n"
        return header.encode() + (text.encode() if kind == "ply" else binary)
    if kind == "xyz":
        return ("//" + " ".join(names).replace("intensity", "Scalar_Intensity") + "\n" + text).encode()
    if kind == "txt":
        return text.replace(" ", ",").encode()
    packed = (COLORS << [16, 8, 0]).sum(axis=1).astype("<u4")
    columns = [*SCAN.values(), packed.view("<f4"), LABELS]
    row = [(name, "<f4") for name in (*SCAN, "rgb")] + [("label", "<u2"), ("_", "u1", (2,))]
    header = f"# .PCD v.7\nVERSION .7\nFIELDS {' '.join(names[:3])} normal_x normal_y normal_z intensity rgb label _\n"
    header += "SIZE 4 4 4 4 4 4 4 4 2 1\nTYPE F F F F F F F F U U\nCOUNT 1 1 1 1 1 1 1 1 1 2\nWIDTH 20\nHEIGHT 1\n"
    header += f"VIEWPOINT 0 0 0 1 0 0 0\nPOINTS 20\nDATA {'ascii' if kind == 'pcd' else 'binary'}\n"
    rows = np.empty(20, row)
    for (name, *_), column in zip(row, [*columns, 0], strict=True):
        rows[name] = column if name != "_" else 0
    if kind != "pcd":
        return header.encode() + rows.tobytes()
    lines = [" ".join(f"{number:.9g}" for number in (*[c[i] for c in columns], 0, 0)) for i in range(20)]
    return header.encode() + "\n".join(lines).encode()


class TestScans:
    COLUMNS = (*SCAN, "red", "green", "blue", "label")

    def write(self, root, content, suffix, names=("a/0", "b/1")):
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / f"{name}.{suffix}").write_bytes(content)
        return root

    @pytest.mark.parametrize("kind", ["ply", "ply binary", "pcd", "pcd binary", "xyz", "txt"])
    def test_formats(self, tmp_path, kind):
        """All formats give the same points with the same attributes, in any order."""
        self.write(tmp_path, scan_file(kind), kind.split()[0])
        options = {"columns": self.COLUMNS} if kind == "txt" else {}
        scans = ld.MeshFolder(tmp_path, points=20, shares=(1.0, 0.0), labels=[*"uvw"], **options)
        assert (len(scans), scans.channels) == (2, ("red", "green", "blue", "intensity"))
        for data in scans:
            order = np.argsort(SCAN["intensity"])[np.argsort(np.argsort(data.x[:, 3].numpy()))]
            np.testing.assert_allclose(data.x[:, :3], COLORS[order] / 255, atol=1e-7)
            np.testing.assert_allclose(data.x[:, 3], SCAN["intensity"][order], atol=1e-7)
            assert data.y.tolist() == LABELS[order].tolist()
            normal = np.stack([SCAN[axis] for axis in ("nx", "ny", "nz")], axis=1)[order]
            np.testing.assert_allclose(data.normal, normal / np.linalg.norm(normal, axis=1, keepdims=True), atol=1e-6)
            pos = ld.normalize_cloud(np.stack([SCAN[axis] for axis in "xyz"], axis=1))[order]
            np.testing.assert_allclose(data.pos, pos, atol=1e-6)
        kinds = ld.MeshFolder(tmp_path, points=5, shares=(1.0, 0.0), rotate="SO3", **options)
        assert (kinds.classes, kinds.labels.tolist(), kinds[0].x.shape) == (("a", "b"), [0, 1], (5, 4))

    def test_normals_are_estimated_and_turn_with_the_scan(self, tmp_path):
        """The normals of a ball point outwards, and those of turned points are the turned normals."""
        ball = ld.fibonacci_sphere(200)
        ball = np.concatenate([ball, [[np.nan, 0, 0]]])  # not seen by the camera
        turn = np.linalg.qr(RANDOM.normal(size=(3, 3)))[0]
        for name, places in (("0", ball), ("1", ball @ turn.T)):
            rows = "\n".join(" ".join(map(repr, place)) for place in places.tolist())
            self.write(tmp_path, rows.encode(), "xyz", [f"a/{name}"])
        options = {"points": 200, "shares": (1.0, 0.0), "columns": [*"xyz"]}
        first, second = ld.MeshFolder(tmp_path, **options)
        assert ((first.pos * first.normal).sum(1) > 0.99).all()
        order = torch.cdist(first.pos @ torch.from_numpy(turn.T).float(), second.pos).argmin(dim=1)
        torch.testing.assert_close(
            second.normal[order], first.normal @ torch.from_numpy(turn.T).float(), atol=1e-4, rtol=0
        )

    @pytest.mark.parametrize("places", [["0 0 0"], 5 * ["1 1 1"], ["0 0 0", "1 0 0", "2 0 0", "3 0 0"]])
    def test_no_normals_on_a_line(self, tmp_path, places):
        self.write(tmp_path, "\n".join(places).encode(), "xyz")
        data = ld.MeshFolder(tmp_path, points=8, shares=(1.0, 0.0))[0]
        assert data.pos.isfinite().all()
        assert (data.normal == 0).all()
        assert "x" not in data

    @pytest.mark.parametrize(
        ("suffix", "content", "message"),
        [
            ("pcd", scan_file("pcd binary")[:-1], "promises 720 bytes, but there are 719"),
            ("pcd", scan_file("pcd").rpartition(b"\n")[0], "promises 20 rows"),
            ("pcd", scan_file("pcd").replace(b"DATA ascii", b"DATA binary_compressed"), "write it as ascii or binary"),
            ("pcd", b"VERSION .7\n", "does not begin with the header of a PCD file"),
            ("ply", scan_file("ply binary")[:-3], "cannot be read as a scan"),
            (
                "ply",
                scan_file("ply").replace(b"property float x\n", b"property float t\n"),
                "expected columns x, y and z",
            ),
            ("ply", scan_file("ply").replace(b" 2\n", b" 2.5\n"), "label has numbers that its type cannot hold"),
            ("xyz", b"1 2 3 4\n5 6 7 8\n", "has 4 columns without names: pass columns"),
            ("xyz", b"2\ncomment\nC 0 0 0\nO 1 0 0\n", "cannot be read as a scan"),
            ("xyz", b"x y z intensity\n0 0 0 nan\n1 0 0 1\n", "intensity: expected finite numbers"),
            ("xyz", b"nan 0 0\n", "no points with finite positions"),
            ("xyz", b"", "no points with finite positions"),
            ("xyz", scan_file("xyz"), "expected no channels as in the first file, got blue, green, intensity, red"),
        ],
    )
    def test_damaged_files_are_named(self, tmp_path, suffix, content, message):
        self.write(tmp_path, b"0 0 0\n", "xyz", ["a/0"])
        self.write(tmp_path, content, suffix, ["a/1"])
        with pytest.raises(ValueError, match=rf"1 of 2 files cannot be used: .*1\.{suffix}.*{message}"):
            ld.MeshFolder(tmp_path, points=4, shares=(1.0, 0.0))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (
                {"labels": ["u", "v"]},
                r"0\.ply: expected a column label of integers in 0 \.\. 1, got numbers in 0 \.\. 2",
            ),
            ({"labels": []}, "labels: expected at least one class of points, got an empty list"),
            ({"points": 0}, "points: expected an integer of at least 1, got 0"),
            ({"columns": ["x", "y"]}, "columns: expected x, y and z, and others, got "),
        ],
    )
    def test_bad_arguments(self, tmp_path, options, message):
        self.write(tmp_path, scan_file("ply"), "ply", ["a/0"])
        with pytest.raises(ValueError, match=message):
            ld.MeshFolder(tmp_path, **{"points": 4, "shares": (1.0, 0.0), **options})

    def test_splits_of_scans_without_classes(self, tmp_path):
        """As of scenes whose points have labels. The names of splits are no classes."""
        for split, count in (("train", 3), ("val", 1), ("test", 2)):
            table = b"x y z scalar_Label\n" + b"".join(b"%d 0 %d %d\n" % (n, n % 3, n % 2) for n in range(20))
            self.write(tmp_path, table, "xyz", [f"{split}/{number}" for number in range(count)])
        parts = [ld.MeshFolder(tmp_path, s, points=4, labels=["floor", "wall"]) for s in ("train", "valid", "test")]
        assert [[Path(file).parent.name for file in part.files] for part in parts] == [
            ["train"] * 3,
            ["val"],
            ["test"] * 2,
        ]
        assert parts[0][0].y.shape == (4,)
        with pytest.raises(ValueError, match=r"labels: expected those of the files or, in a list, .* got None"):
            ld.MeshFolder(tmp_path, points=4)
        (tmp_path / "train" / "0.xyz").write_bytes(b"x y z scalar_field\n0 0 0 1\n1 0 0 1\n")
        with pytest.raises(ValueError, match=r"got none \(its name may also be class"):
            ld.MeshFolder(tmp_path, points=4, labels=["floor", "wall"])

    @pytest.mark.parametrize("columns", ["x y z label class", "x y z classification scalar_Label"])
    def test_label_is_read_rather_than_other_names_of_it(self, tmp_path, columns):
        rows = [" ".join(f"{n if 'label' in name.lower() else 7 * n}" for name in columns.split()) for n in range(2)]
        table = "\n".join([columns, *rows])
        self.write(tmp_path, table.encode(), "xyz", ["0"])
        data = ld.MeshFolder(tmp_path, points=2, labels=["floor", "wall"], shares=(1.0, 0.0))[0]
        assert sorted(data.y.tolist()) == [0, 1]

    def test_texts_beside_meshes_are_no_scans(self, tmp_path):
        self.write(tmp_path, b"Read me first.", "txt", ["a/0"])
        self.write(tmp_path, off(), "off", ["a/1"])
        assert len(ld.MeshFolder(tmp_path, points=4, shares=(1.0, 0.0))) == 1


class TestVoxels:
    def write_tiny(self, root, **changes):
        content = {
            "points": RANDOM.integers(0, 30, (6, 20, 3), dtype=np.uint8),
            "label": np.array([0, 1, 0, 1, 0, 1], dtype=np.uint8),
            "classes": np.array([b"bathtub", b"bed"]),
            "split_train": np.array([0, 1, 2, 3]),
            "split_test": np.array([4, 5]),
        }
        content.update(changes)
        np.savez(root / "modelnet10_tiny.npz", **content)
        return content

    def test_tiny(self, tmp_path):
        content = self.write_tiny(tmp_path)
        test = ld.ModelNet10Tiny(tmp_path, "test", points=12, verify=False)
        assert test.labels.tolist() == [0, 1]
        assert test.classes == ("bathtub", "bed")
        expected = ld.normalize_cloud(content["points"][5][:12])
        np.testing.assert_allclose(test[1].pos, expected, atol=1e-6)
        parts = [ld.ModelNet10Tiny(tmp_path, split, validation=1, verify=False) for split in ("train", "valid")]
        assert [len(part) for part in parts] == [3, 1]
        with pytest.raises(ValueError, match=r"points: expected None or an integer in 1 \.\. 20, got 21"):
            ld.ModelNet10Tiny(tmp_path, points=21, verify=False)

    def write_adrenal(self, root, masks, **changes):
        shape = masks.shape[1:]
        packed = np.packbits(masks.reshape(len(masks), -1), axis=1)
        content = {"voxel_shape": np.array(shape), "classes": np.array([b"normal", b"hyperplasia"])}
        for key in ("train", "val", "test"):
            content |= {f"voxels_packed_{key}": packed, f"label_{key}": np.arange(len(masks)) % 2}
        content.update(changes)
        np.savez(root / "adrenalmnist3d.npz", **content)

    def test_adrenal(self, tmp_path):
        masks = np.zeros((2, 10, 10, 10), dtype=bool)
        masks[0, 2:8, 2:8, 2:8] = True
        masks[1, 5, 5, 5] = True
        self.write_adrenal(tmp_path, masks)
        train = ld.AdrenalMNIST3D(tmp_path, points=100, verify=False)
        pos = train[0].pos.double() * 5
        places = pos - pos.min(0).values
        on_side = (places < 0.01) | (places > 4.99)
        assert on_side.any(dim=1).all()  # the surface of the cube, without its interior
        assert len(torch.unique(places.round(), dim=0)) == 100  # drawn without repetition from the 152 of the surface
        np.testing.assert_allclose(pos.mean(0), 0, atol=1e-5)
        assert train[1].pos.abs().max() == 0
        assert train.labels.tolist() == [0, 1]
        assert train.classes == ("normal", "hyperplasia")
        valid = ld.AdrenalMNIST3D(tmp_path, "valid", points=100, verify=False)
        assert not torch.equal(valid[0].pos, train[0].pos)

    def test_voxels_of_adrenal(self, tmp_path):
        """Filled voxels are at the points of the surface, and networks read a raster from them."""
        masks = np.random.default_rng(0).random((2, 4, 5, 6)) < 0.3
        self.write_adrenal(tmp_path, masks)
        glands = ld.AdrenalMNIST3D(tmp_path, voxels=True, verify=False)
        gland = glands[1]
        assert gland.grid.tolist() == [[6, 5, 4]]
        places = gland.pos[gland.x[:, 0] > 0] * 3 + (torch.tensor([4, 5, 6]) - 1) / 2
        assert {tuple(place) for place in places.round().int().tolist()} == set(map(tuple, np.argwhere(masks[1])))
        batch = Batch.from_data_list(list(glands))
        images = grid_images(batch)
        torch.testing.assert_close(images.flatten(1), batch.x.view(2, -1))
        turn = octahedral()
        batch.pos = turn.act(5, batch.pos)
        torch.testing.assert_close(grid_images(batch), act_on_grid(turn, 5, images))
        with pytest.raises(ValueError, match="rotate: expected 'none' for voxels"):
            ld.AdrenalMNIST3D(tmp_path, voxels=True, rotate="SO3", verify=False)
        with pytest.raises(ValueError, match="points: expected an integer of at least 1"):
            ld.AdrenalMNIST3D(tmp_path, points=0)

    def write_med(self, root, *shape, labels=1, **changes):
        """Write ``some.npz`` in the format of MedMNIST, with three images in each split."""
        generator, content = np.random.default_rng(0), {}
        for key in ("train", "val", "test"):
            content[f"{key}_images"] = generator.integers(256, size=(3, *shape), dtype=np.uint8)
            classes = np.arange(3)[:, None] if labels == 1 else generator.integers(2, size=(3, labels))
            content[f"{key}_labels"] = classes.astype(np.uint8)
        np.savez(root / "some.npz", **content | changes)
        return content

    @pytest.mark.parametrize("shape", [(4, 5), (4, 5, 3), (4, 5, 6)], ids=["grey", "color", "volume"])
    def test_images_of_medmnist(self, tmp_path, shape):
        content = self.write_med(tmp_path, *shape, test_labels=np.array([[0], [1], [1]]))
        items = ld.MedMNIST(tmp_path, "some", "test")
        assert (len(items), items.num_classes, items.num_labels) == (3, 3, 1)
        assert items.labels.tolist() == [0, 1, 1]
        image, item = content["test_images"][2], items[2]
        if len(shape) == 2 or shape[2] == 3:
            expected = ld.image_to_data(image, 1)
            assert all(torch.equal(item[name], expected[name]) for name in ("x", "pos", "grid", "y"))
            return
        assert item.grid.tolist() == [[4, 5, 6]]
        assert item.x.flatten().tolist() == pytest.approx((image.flatten() / 255).tolist())
        assert item.pos[0].tolist() == [-2.5, 2.0, -1.5]
        assert item.pos[-1].tolist() == [2.5, -2.0, 1.5]

    def test_several_labels(self, tmp_path):
        content = self.write_med(tmp_path, 4, 5, labels=4)
        items = ld.MedMNIST(tmp_path, "some", "valid")
        assert (items.num_classes, items.num_labels) == (2, 4)
        assert torch.cat([item.y for item in items]).tolist() == content["val_labels"].tolist()

    def test_classes_are_those_of_the_named_data_set(self, tmp_path):
        assert len(_shapes._MEDICAL) == 18
        for name, *found in (("bloodmnist", 8, 1), ("organmnist3d_64", 11, 1), ("chestmnist", 2, 14)):
            self.write_med(tmp_path, 4, 5, labels=found[1])
            (tmp_path / "some.npz").rename(tmp_path / f"{name}.npz")
            items = ld.MedMNIST(tmp_path, name, "test")
            assert [items.num_classes, items.num_labels] == found
        for wrong, changes, message in (
            ("pneumoniamnist", {}, "test_labels"),  # with classes 0 to 2
            ("bloodmnist", {"labels": 4}, "has 4 labels of each image, and bloodmnist has 1"),
        ):
            self.write_med(tmp_path, 4, 5, **changes)
            (tmp_path / "some.npz").rename(tmp_path / f"{wrong}.npz")
            with pytest.raises(ValueError, match=rf"{wrong}\.npz.*{message}"):
                ld.MedMNIST(tmp_path, wrong, "test")

    def test_full_grids_have_a_surface(self):
        places = _shapes.surface_voxels(np.ones((3, 3, 3), dtype=bool), 30, frozen_stream(0))
        assert len(places) == 30
        assert len(np.unique(places, axis=0)) == 26
        assert [1, 1, 1] not in places.tolist()


def write_scans(root, folder="main_split", name="test_objectdataset.h5", **changes):
    """Write objects in the format of ScanObjectNN, some of whose points are around them; some changes leave out."""
    h5py = pytest.importorskip("h5py")
    generator = np.random.default_rng(0)
    content = {
        "data": generator.normal(size=(4, 20, 3)).astype(np.float32) + 5,
        "label": np.array([0, 14, 3, 3]),
        "mask": generator.integers(-1, 2, (4, 20)),
    } | changes
    (root / folder).mkdir(parents=True, exist_ok=True)
    with h5py.File(root / folder / name, "w") as file:
        for key, value in content.items():
            if value is not None:
                file[key] = value
    return content


class TestScanObjectNN:
    def test_points_of_objects(self, tmp_path):
        content = write_scans(tmp_path)
        objects = ld.ScanObjectNN(tmp_path, "test", points=12)
        assert objects.labels.tolist() == [0, 14, 3, 3]
        assert [objects.classes[number] for number in (0, 3, 14)] == ["bag", "cabinet", "toilet"]
        assert objects.num_classes == 15
        x, y, z = ld.normalize_cloud(content["data"][1][:12]).T
        np.testing.assert_allclose(objects[1].pos, np.stack([x, -z, y], axis=1), atol=1e-6)
        assert objects[1].y.tolist() == [14]
        parts = ld.ScanObjectNN(tmp_path, "test", points=12, per="point")
        assert torch.equal(parts[2].pos, objects[2].pos)
        assert parts[2].y.tolist() == [int(mask != -1) for mask in content["mask"][2][:12]]
        assert parts.classes == ("background", "object")

    def test_files_of_variants(self, tmp_path):
        write_scans(tmp_path, "h5_files/main_split_nobg", mask=None)
        write_scans(tmp_path, "h5_files/main_split", "training_objectdataset_augmentedrot_scale75.h5")
        alone = ld.ScanObjectNN(tmp_path, "test", background=False, points=20)
        assert len(alone) == 4
        split = [ld.ScanObjectNN(tmp_path, s, variant="PB_T50_RS", points=20, validation=1) for s in ("train", "valid")]
        assert [len(part) for part in split] == [3, 1]
        within = tmp_path / "h5_files" / "main_split_nobg"
        assert len(ld.ScanObjectNN(within, "test", background=False, points=20)) == 4
        with pytest.raises(ValueError, match=r"background: expected False for files in .*_nobg'"):
            ld.ScanObjectNN(within, "test", points=20)
        with pytest.raises(ValueError, match="per: expected 'cloud' for objects without background"):
            ld.ScanObjectNN(tmp_path, "test", background=False, per="point")
        with pytest.raises(FileNotFoundError, match=r"needs the file training_objectdataset_augmented25rot\.h5"):
            ld.ScanObjectNN(tmp_path, variant="PB_T25_R")

    def test_damaged(self, tmp_path):
        for changes, message in (
            ({"data": np.zeros((4, 20, 2))}, r"has data of .* expected number \[objects, points, 3\]"),
            ({"data": np.full((4, 20, 3), np.nan)}, "has data with numbers that are not finite"),
            ({"label": np.array([0, 1, 2])}, "has label of int64 .* with {'objects': 4}"),
            ({"label": np.array([0, 1, 2, 15])}, r"has label in 0 \.\. 15, expected 0 \.\. 14"),
            ({"mask": None}, "has no array 'mask', only data, label"),
            ({"mask": np.zeros((4, 19), dtype=int)}, "has mask of int64 .*'points': 20"),
        ):
            write_scans(tmp_path, **changes)
            with pytest.raises(ValueError, match=rf"test_objectdataset\.h5 {message}"):
                ld.ScanObjectNN(tmp_path, "test", per="point", points=20)
        write_scans(tmp_path)
        with pytest.raises(ValueError, match=r"points: expected an integer in 1 \.\. 20, got 1024"):
            ld.ScanObjectNN(tmp_path, "test")

    def test_missing_package(self, tmp_path, monkeypatch):
        write_scans(tmp_path)
        monkeypatch.setitem(sys.modules, "h5py", None)
        with pytest.raises(ImportError, match=r'ScanObjectNN needs the package h5py: pip install "lieattn\[data\]"'):
            ld.ScanObjectNN(tmp_path, "test")


class TestProcedural:
    @pytest.mark.parametrize("kind", ld.SHAPE_CLASSES)
    def test_solids(self, kind):
        for seed in range(3):
            vertices, faces = _procedural.make_shape(kind, frozen_stream(seed), stretch=0.3, bend=1.0)
            mesh = trimesh.Trimesh(vertices, faces, process=True)
            assert mesh.is_winding_consistent
            assert mesh.is_watertight == (kind != "arch")
            assert mesh.volume > 0.1  # so normals point outwards
            assert 0.8 < mesh.extents.max() < 4.5

    def test_bend(self):
        line = np.stack([np.zeros(9), np.zeros(9), np.linspace(-1, 1, 9)], axis=1)
        bent = _procedural._bend(line, 1.0, 0.3)
        steps = np.diff(bent, axis=0)
        turned = steps[0] @ steps[-1] / np.linalg.norm(steps[0]) / np.linalg.norm(steps[-1])
        assert np.arccos(turned) == pytest.approx(7 / 8, abs=1e-6)  # 1 radian in 8 steps between the ends
        np.testing.assert_allclose(np.linalg.norm(steps, axis=1).sum(), 2, rtol=1e-2)
        np.testing.assert_array_equal(_procedural._bend(line, 0.0, 0.3), line)

    def test_holes(self):
        vertices, faces = _procedural.make_shape("ball", frozen_stream(0))
        pierced = _procedural._pierce(vertices, faces, 2, frozen_stream(1))
        assert 0.5 * len(faces) < len(pierced) < len(faces)
        assert np.array_equal(_procedural._pierce(vertices, faces, 0, frozen_stream(1)), faces)
        assert not trimesh.Trimesh(vertices, pierced).is_watertight
        most = _procedural._pierce(vertices, faces, 300, frozen_stream(1))
        areas = [trimesh.Trimesh(vertices, some).area for some in (faces, most)]
        assert 0.5 * areas[0] <= areas[1] < 0.7 * areas[0]

    def test_items(self):
        shapes = ld.ProceduralShapes(size=32, points=64)
        assert shapes.labels.tolist() == list(range(16)) * 2
        for data in shapes:
            assert data.pos.shape == (64, 3)
            torch.testing.assert_close(data.normal.norm(dim=1), torch.ones(64))
            assert 0.9 < data.pos.norm(dim=1).max() < 1.1
        clean, noisy = (ld.ProceduralShapes(size=3, points=500, noise=noise) for noise in (0.0, 0.02))
        step = ((noisy[2].pos - clean[2].pos) * clean[2].normal).sum(-1)
        assert step.std().item() == pytest.approx(0.02, rel=0.15)
        across = noisy[2].pos - clean[2].pos - step[:, None] * clean[2].normal
        assert across.abs().max() < 1e-6

    def test_some_kinds(self):
        shapes = ld.ProceduralShapes(size=3, points=16, kinds=["bracket", "star"])
        assert [ld.SHAPE_CLASSES[label] for label in shapes.labels] == ["bracket", "star", "bracket"]
        with pytest.raises(ValueError, match="kinds: expected some of"):
            ld.ProceduralShapes(size=3, points=16, kinds=["brackets"])

    @pytest.mark.parametrize("change", [{"stretch": 1.0}, {"bend": 3.0}, {"holes": -1}, {"noise": -1}])
    def test_bad_arguments(self, change):
        with pytest.raises(ValueError, match="stretch, noise, bend, holes: expected numbers in"):
            ld.ProceduralShapes(size=1, **change)
        with pytest.raises(ValueError, match="points: expected an integer of at least 1"):
            ld.ProceduralShapes(size=1, points=0)


class TestScenes:
    def test_points_have_the_kinds_of_their_solids(self):
        kinds = ("ball", "box", "star")
        scenes = ld.ProceduralScenes(size=6, points=100, solids=4, kinds=kinds)
        assert scenes.classes == kinds
        assert scenes.labels.shape == (6, 100)
        for data in scenes:
            assert data.solid.bincount().tolist() == [25] * 4
            assert all(len(data.y[data.solid == number].unique()) == 1 for number in range(4))
            torch.testing.assert_close(data.pos.norm(dim=1).max(), torch.tensor(1.0))
            torch.testing.assert_close(data.normal.norm(dim=1), torch.ones(100))
        assert len(scenes.labels.unique()) == 3

    def test_normals_turn_with_their_solids(self):
        """They are nearly at right angles with the directions to the nearest points."""
        for data in ld.ProceduralScenes(size=3, points=900, solids=1, kinds=["tube"]):
            apart = data.pos[:, None] - data.pos
            near = apart.norm(dim=-1).fill_diagonal_(9).argmin(dim=1)
            steps = torch.nn.functional.normalize(apart[torch.arange(900), near], dim=1)
            assert (steps * data.normal).sum(dim=1).abs().median() < 0.3

    def test_solids_are_apart_and_upright(self):
        """Each solid is in a sphere of its own, and a torus lies flat."""
        scenes = ld.ProceduralScenes(size=4, points=600, solids=3, kinds=["torus"])
        for data in scenes:
            parts = [data.pos[data.solid == number].double() for number in range(3)]
            centers = torch.stack([(part.amax(0) + part.amin(0)) / 2 for part in parts])
            sizes = torch.stack(
                [(part - center).norm(dim=1).max() for part, center in zip(parts, centers, strict=True)]
            )
            assert (torch.cdist(centers, centers) + 9 * torch.eye(3) > 0.9 * (sizes[:, None] + sizes)).all()
            for number in range(3):
                inner = data.normal[data.solid == number, 2].abs()
                assert inner.max() > 0.9

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"solids": 0}, "solids: expected an integer in 1 .. 256, the number of points, got 0"),
            ({"solids": 5, "points": 4}, "solids: expected an integer in 1 .. 4"),
            ({"kinds": ["brick"]}, "kinds: expected some of"),
            ({"points": 0}, "points: expected an integer of at least 1"),
        ],
    )
    def test_bad_arguments(self, change, message):
        with pytest.raises(ValueError, match=message):
            ld.ProceduralScenes(size=1, **change)


def test_labels_of_points():
    rng = np.random.default_rng(0)
    pos, labels = rng.normal(size=(2, 5, 3)), rng.integers(3, size=(2, 5))
    shapes = ld.ShapePoints(pos, None, labels, ["seat", "back", "leg"])
    assert [data.y.tolist() for data in shapes] == labels.tolist()
    with pytest.raises(ValueError, match=r"\[shapes\] or \[shapes, points\], got \[2, 5, 3\] and \[2, 4\]"):
        ld.ShapePoints(pos, None, labels[:, :4], ["seat", "back", "leg"])
