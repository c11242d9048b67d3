"""Hostile files: every loader refuses them, runs no code, and reads only its own files."""

import gzip
import inspect
import io
import json
import os
import pickle
import random
import shutil
import struct
import warnings
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
import trimesh

import lieattn_datasets as ld
from lieattn_datasets import _files, _meshes
from lieattn_datasets._files import Archive, Release
from tests import test_datasets
from tests.cases import each
from tests.fuzz._data_sets import CASES, Case, of_loaders
from tests.fuzz._target import Verdict
from tests.fuzz.data_files import DAMAGES, judge
from tests.test_data_dynamics import GENERATED
from tests.test_data_shapes import off

HARMFUL = ("hostile pickle", "hostile torch file", "bomb", "other array", "false promise")


def test_every_loader_is_tested():
    assert {name.split()[0] for name in CASES} == of_loaders()


@each("damage", HARMFUL)
@pytest.mark.parametrize("name", CASES)
def test_harmful_files_are_refused(name, damage):
    """Each file has another damage of this kind."""
    case = CASES[name]
    for file in case.files:
        content = DAMAGES[damage](random.Random(f"{name} {file}"), (case.folder / file).read_bytes())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            verdict = judge(case, file, content, damage, f"{name} {file}")
        assert verdict in (Verdict.NAMED, Verdict.CORRECT), verdict


DATA_SETS = {
    **{
        n: lambda case=c: case.load(case.folder) for n, c in CASES.items() if inspect.isclass(getattr(ld, n.split()[0]))
    },
    **{name: lambda make=make: make(size=2) for name, make in GENERATED.items()},
    "Digits": ld.Digits,
}
OF_SPLITS = sorted(
    {kind for kind in map(str, of_loaders()) if "split" in inspect.signature(getattr(ld, kind)).parameters}
)


def equal_items(one, other):
    items = [data[index].to_dict() for data in (one, other) for index in range(len(one))]
    pairs = zip(items[: len(one)], items[len(one) :], strict=True)
    return all(
        first.keys() == second.keys() and all(map(same, first.values(), second.values())) for first, second in pairs
    )


def same(one, other):
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("name", DATA_SETS)
def test_what_every_data_set_promises(name):
    """Copies by pickle, as in worker processes, and views have the same items, which own their memory."""
    data = DATA_SETS[name]()
    assert equal_items(data, pickle.loads(pickle.dumps(data)))
    view = data.subset([-1, 0]).with_transform(lambda item: item.y)
    assert torch.equal(view[1].nan_to_num(), data[0].y.nan_to_num())
    assert data.transform is None
    before = data[0].clone()
    for key, value in data[0].to_dict().items():
        if key != "pos" or not isinstance(data, ld.ImagePoints):  # images share their grid
            value.zero_()
    assert all(same(value, data[0][key]) for key, value in before.to_dict().items())
    assert type(data).__name__ in repr(data)


@each("name", OF_SPLITS)
def test_missing_files_and_unknown_splits(tmp_path, name):
    kind = getattr(ld, name)
    with pytest.raises(ValueError, match=r"split: expected one of \('train'.* got 'dev'"):
        kind(tmp_path, split="dev")
    with pytest.raises(FileNotFoundError) as caught:
        kind(tmp_path / "absent")
    assert "absent" in str(caught.value)


PUBLISHED = [name for name in OF_SPLITS if "verify" in inspect.signature(getattr(ld, name)).parameters]


@pytest.mark.parametrize("name", PUBLISHED)
def test_other_files_than_the_published_ones_are_refused(tmp_path, name):
    """By their digest, or, where none is published, by the number of their items."""
    case = CASES[name]
    shutil.copytree(case.folder, tmp_path, dirs_exist_ok=True)
    kind, options = getattr(ld, name), {"number": 2} if name == "RMD17" else {}
    options |= {"molecule": "uracil"} if name == "RMD17Subset" else {}
    options |= {"points": 8} if name == "ModelNet" else {}
    with pytest.raises(ValueError, match=r"has the digest|but the official file holds"):
        kind(tmp_path, split="test", **options)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        FileNotFoundError, match=r"needs the file .* in root=.*(is empty|no such folder).* yourself.*\. The|no meshes"
    ):
        kind(tmp_path / "empty", split="test", **options)


ALTERED = [
    ("FashionMNIST900", {"x": lambda x: x[:, :5]}, r"has x of uint8 .*, expected uint8 \[images, 28, 28\]"),
    ("FashionMNIST900", {"y": lambda y: y + 1}, r"has y in 1 \.\. 10, expected 0 \.\. 9"),
    ("FashionMNIST900", {"x": lambda x: x.astype(object)}, "has x, which is not a plain array"),
    ("FashionMNIST900", {"y": None}, "has no array 'y', only x"),
    ("CIFAR10Subset", {"x_test": lambda x: x[..., 0]}, r"has x_test of .* expected uint8 \[images, 32, 32, 3\]"),
    ("RotatedMNISTRecipe", {"x_test": lambda x: x[:0], "y_test": lambda y: y[:0]}, "has no images of test"),
    ("QM9Subset", {"split_test": lambda s: [7, 4]}, "does not have each of its 8 molecules in exactly one split"),
    ("QM9Subset", {"target_names": lambda t: t[::-1]}, "has targets named C, B, A, .*, expected mu, alpha"),
    ("QM9Subset", {"offsets": lambda o: [0, 3, 8]}, "does not hold molecules: offsets: expected numbers that rise"),
    ("QM9Subset", {"z": lambda z: 0 * z + 16}, "holds atoms other than"),
    ("QM9GFN2", {"gdb_index": lambda g: g + 1}, "has labels of different molecules than qm9_subset.npz"),
    ("NBody", {"vel": lambda v: v[:, :2]}, "has vel of float32"),
    ("SphericalMNIST", {"x_test_r": lambda x: x[..., :7]}, "has alpha of"),
    ("SphericalMNIST", {"beta": lambda b: b[::-1]}, "has beta other than"),
    ("SphericalMNIST", {"alpha": lambda a: 45.0 * np.arange(8)}, "has beta .* or alpha in degrees"),
    ("SphericalMNIST", {"y_test": lambda y: 0 * y + 10}, r"has y_test in 10 \.\. 10, expected 0 \.\. 9"),
    ("SphericalMNIST", {"y_test": lambda y: y[:1]}, "has 1 labels for 2 images"),
    ("WindOnSphere", {"u": lambda u: u[..., :11]}, "has v of float32"),
    ("WindOnSphere", {"u": lambda u: u * np.nan}, "has u with numbers that are not finite"),
    ("WindOnSphere", {"lat": lambda lat: 0.9 * lat}, "has latitudes that are not equally spaced from 90 to -90"),
    ("ModelNet10Tiny", {"label": lambda y: np.zeros(3)}, r"has label of float64 \[3\], expected integer"),
    ("ModelNet10Tiny", {"split_test": lambda s: [6]}, r"has split_test in 6 \.\. 6, expected 0 \.\. 5"),
    ("AdrenalMNIST3D", {"label_test": lambda y: y * 0.5}, "has label_test of float64"),
    ("AdrenalMNIST3D", {"voxels_packed_test": lambda v: 0 * v}, "has an empty mask, number 0 of test"),
    ("AdrenalMNIST3D", {"voxel_shape": lambda v: v + 1}, r"has voxels .* for masks of \[7, 7, 7\]"),
    ("MedMNIST", {"test_labels": lambda y: y + 1}, r"has test_labels in 1 \.\. 3, expected 0 \.\. 2"),
    ("MedMNIST", {"test_labels": lambda y: y[:, 0]}, r"has test_labels of uint8 \[3\], expected integer"),
    ("MedMNIST", {"test_labels": lambda y: y[:2]}, "has test_labels of uint8 .* with {'images': 3}"),
    ("MedMNIST", {"test_images": lambda x: x[:, 0]}, r"has test_images \[3, 6\], which are no images or volumes"),
    ("RMD17", {"coords": lambda x: x[:, :3]}, r"has coords of float64 .* with .*'atoms': 4"),
    ("RMD17", {"energies": lambda e: e.astype(np.float32)}, "has energies of float32 .*, expected float64"),
    ("RMD17", {"forces": lambda f: f * np.nan}, "has forces with numbers that are not finite"),
    ("RMD17", {"nuclear_charges": lambda z: 0 * z}, r"has nuclear_charges \[0, 0, 0, 0\], expected nuclear charges"),
]


@pytest.mark.parametrize(("name", "changes", "message"), ALTERED, ids=[f"{name} {[*c]}" for name, c, _ in ALTERED])
def test_altered_arrays_are_named(tmp_path, name, changes, message):
    shutil.copytree(CASES[name].folder, tmp_path, dirs_exist_ok=True)
    for path in tmp_path.rglob("*.npz"):
        content = dict(np.load(path))
        if name != "QM9GFN2" or "energy" in content:
            made = {key: change(content[key]) for key, change in changes.items() if change}
            kept = {key: value for key, value in (content | made).items() if changes.get(key, True)}
            np.savez(path, **kept)
    with pytest.raises(ValueError, match=rf"\.npz {message}"):
        CASES[name].load(tmp_path)


def test_the_judge_sees_what_runs():
    """Control: the tests detect a loader that unpickles."""

    def unpickle(folder):
        pickle.loads((folder / "data.pkl").read_bytes())
        return (np.zeros(1),)

    careless = Case(lambda folder: (folder / "data.pkl").write_bytes(pickle.dumps(0)), unpickle)
    content = DAMAGES["hostile pickle"](random.Random(0), b"")
    assert judge(careless, "data.pkl", content, "hostile pickle", "").verdict == Verdict.EXECUTED


class TestArchives:
    def refused(self, path, message, name="a"):
        def refuse(problem):
            return ValueError(f"{path.name} {problem}")

        with pytest.raises(ValueError, match=rf"data\.zip {message}"), Archive(path, refuse) as archive:
            archive.read(name)

    @pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    def test_other_methods(self, tmp_path, method):
        with zipfile.ZipFile(tmp_path / "data.zip", "w", method) as archive:
            archive.writestr("a", bytes(1000))
        self.refused(tmp_path / "data.zip", "has the member a, which is not compressed with deflate")

    def test_bombs(self, tmp_path, monkeypatch):
        monkeypatch.setattr(_files, "MOST_BYTES", 1000)
        path = tmp_path / "data.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a", bytes(1001))
        self.refused(path, "has the member a of 1001 bytes, which is more than 1000")
        size = struct.pack("<I", 1001)
        path.write_bytes(path.read_bytes().replace(size, struct.pack("<I", 10)))  # a false size: it unpacks to more
        self.refused(path, "is a damaged zip archive: a cannot be unpacked .*CRC")

    def test_members_that_overlap_or_repeat(self, tmp_path):
        path = tmp_path / "data.zip"
        with warnings.catch_warnings(), zipfile.ZipFile(path, "w") as archive:
            warnings.simplefilter("ignore")
            archive.writestr("a", b"1")
            archive.writestr("a", b"2")
        self.refused(path, "is not a valid zip archive: members have the same name, or overlap")
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a", bytes(3000))
            second = archive.getinfo("a")
            archive.infolist().append(second)
            archive.filelist.append(second)
        self.refused(path, "is not a valid zip archive")

    def test_names_are_compared_with_the_directory(self, tmp_path):
        path = tmp_path / "data.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a", b"1")
            archive.writestr("bed", b"2")
        content = path.read_bytes()
        at = content.rindex(b"bed")
        path.write_bytes(content[:at] + b"bee" + content[at + 3 :])
        self.refused(path, "is not a complete zip archive .*differ")

    def test_members_that_the_directory_lost(self, tmp_path):
        path = tmp_path / "data.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.comment = b"a comment"
            for name in ("a", "b"):
                archive.writestr(name, b"1")
        content = bytearray(path.read_bytes())
        content[content.index(b"PK\x01\x02") + 32] = 200  # the comment of the first entry spans the second one
        path.write_bytes(content)
        assert zipfile.ZipFile(path).namelist() == ["a"]
        self.refused(path, "is not a complete zip archive .*1 of 2 members are listed")


def test_integers_of_an_array_are_bounded_too(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, charge=np.array([2**63 - 1], dtype=np.uint64))
    release = Release(dataset="data", origin="From nowhere.")
    with pytest.raises(ValueError, match="has charge with numbers that are not finite, or beyond 1e\\+15"):
        release.read_npz(path, {"charge": "number [particles]"})


def test_members_of_an_archive_are_arrays(tmp_path):
    path = tmp_path / "data.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("charge", b"1")
    release = Release(dataset="data", origin="From nowhere.")
    with pytest.raises(ValueError, match="has no array 'charge', only nothing"):
        release.read_npz(path, {"charge": "number [particles]"})


def test_a_file_with_the_right_digest_that_lacks_a_computed_array(tmp_path):
    """Computed arrays do not belong to the digest, so the same file again would not help."""
    path = tmp_path / "made.npz"
    np.savez(path, charge=np.ones(3))
    with Archive(path, ValueError) as archive:
        digests = {"made.npz": "content:" + archive.fingerprint(["energy.npy"])}
    release = Release(dataset="data", origin="From nowhere.", computed=("energy",), digests=digests)
    release.check_file(path)
    with pytest.raises(ValueError, match="has no array 'energy', only charge") as error:
        release.read_npz(path, {"charge": "number [n]", "energy": "number [n]"})
    assert "Replace" not in str(error.value)
    assert f"run 'python datasets/scripts/make.py made {tmp_path}'" in str(error.value)
    downloaded = replace(release, sources=(None,))
    with pytest.raises(ValueError, match=r"Use a file that contains it\. From nowhere"):
        downloaded.read_npz(path, {"energy": "number [n]"})


class TestGzip:
    def test_bomb(self, tmp_path):
        test_datasets.write_idx(tmp_path, pack=True)
        path = tmp_path / "train-images-idx3-ubyte.gz"
        zeros = gzip.compress(bytes(1 << 24)) * 128  # two gibibytes
        for content, message in (
            (path.read_bytes() + zeros, "has more bytes after its header, but the header promises 9408"),
            (
                gzip.compress(bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**31, 28, 28)) + zeros,
                "at most 1073741824 bytes",
            ),
            (zeros, "starts with the bytes 00000000"),
        ):
            path.write_bytes(content)
            with pytest.raises(ValueError, match=rf"train-images-idx3-ubyte\.gz {message}|{message}"):
                ld.MNIST(tmp_path, verify=False)


class TestHdf5:
    @pytest.fixture
    def h5py(self, tmp_path):
        test_datasets.write_pcam(tmp_path)
        return pytest.importorskip("h5py")

    def refused(self, folder, message, name=test_datasets.PCAM_X):
        with pytest.raises(ValueError, match=rf"{name} {message}"):
            ld.PatchCamelyon(folder, "test", verify=False)

    def test_links_to_other_files(self, tmp_path, h5py):
        with h5py.File(tmp_path / "other.h5", "w") as file:
            file["x"] = np.zeros((5, 96, 96, 3), dtype=np.uint8)
        for link in (h5py.ExternalLink(str(tmp_path / "other.h5"), "x"), h5py.SoftLink("/elsewhere")):
            with h5py.File(tmp_path / test_datasets.PCAM_X, "w") as file:
                file["x"] = link
            self.refused(tmp_path, "has no array 'x', only x")

    def test_values_in_other_files(self, tmp_path, h5py):
        shape = (5, 96, 96, 3)
        (tmp_path / "secret").write_bytes(bytes(5 * 96 * 96 * 3))
        with h5py.File(tmp_path / test_datasets.PCAM_X, "w") as file:
            external = [(str(tmp_path / "secret"), 0, 5 * 96 * 96 * 3)]
            file.create_dataset("x", shape, np.uint8, external=external)
        self.refused(tmp_path, "has an array '/x' whose values are in other files")
        layout = h5py.VirtualLayout(shape, np.uint8)
        layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "x", shape)
        with h5py.File(tmp_path / test_datasets.PCAM_X, "w") as file:
            file.create_virtual_dataset("x", layout)
        self.refused(tmp_path, "has an array '/x' whose values are in other files")

    def test_what_was_never_written(self, tmp_path, h5py):
        with h5py.File(tmp_path / test_datasets.PCAM_X, "w") as file:
            file.create_dataset("x", (10**9, 96, 96, 3), np.uint8, chunks=(1, 96, 96, 3))
        self.refused(tmp_path, "has an array '/x' that was written only in part")
        test_datasets.write_pcam(tmp_path)
        with h5py.File(tmp_path / test_datasets.PCAM_Y, "w") as file:
            file.create_dataset("y", (10**12, 1, 1, 1), np.uint8, chunks=(1000, 1, 1, 1))
        self.refused(tmp_path, "has an array '/y' that was written only in part", test_datasets.PCAM_Y)

    def test_other_filters_and_huge_chunks(self, tmp_path, h5py):
        with h5py.File(tmp_path / test_datasets.PCAM_X, "w") as file:
            data = np.zeros((5, 96, 96, 3), dtype=np.uint8)
            file.create_dataset("x", data=data, chunks=(1, 96, 96, 3), compression="lzf")
        self.refused(tmp_path, r"has an array '/x' with the filters \[32000\]")
        with h5py.File(tmp_path / test_datasets.PCAM_X, "w") as file:
            file.create_dataset("x", (10**5, 96, 96, 3), np.uint8, chunks=(10**5, 96, 96, 3))
        self.refused(tmp_path, r"has an array '/x' in chunks of \(100000, 96, 96, 3\)")

    @pytest.mark.parametrize(
        "labels", [np.zeros(5), np.array(1), np.array([b"a"] * 5), np.zeros(0, np.uint8), np.ones((5, 2), np.uint8)]
    )
    def test_labels_of_another_kind(self, tmp_path, h5py, labels):
        with h5py.File(tmp_path / test_datasets.PCAM_Y, "w") as file:
            file["y"] = labels
        message = r"has (y of .*, expected integer .images|\d+ labels, but there are 5)"
        self.refused(tmp_path, message, test_datasets.PCAM_Y)


class TestMeshes:
    def glb(self, change):
        data = trimesh.creation.icosahedron().export(file_type="glb")
        size = int.from_bytes(data[12:16], "little")
        tree = json.loads(data[20 : 20 + size])
        change(tree)
        text = json.dumps(tree).encode()
        head = data[:8] + struct.pack("<I", len(data) + len(text) - size) + struct.pack("<I", len(text)) + data[16:20]
        return head + text + data[20 + size :]

    def test_glb_as_it_is(self):
        vertices, faces = ld.read_mesh("mesh.glb", self.glb(lambda tree: None))
        assert (len(vertices), len(faces)) == (12, 20)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda tree: tree["meshes"][0]["primitives"][0].update(mode=6), "it has fans of triangles, which cannot"),
            (lambda tree: tree["accessors"][1].update(normalized=True), "it has sparse or normalized positions"),
            (lambda tree: tree["accessors"][1].update(sparse={}), "it has sparse or normalized positions"),
            (
                lambda tree: tree.update(extensionsUsed=["KHR_draco_mesh_compression"]),
                "it has KHR_draco_mesh_compression",
            ),
            (lambda tree: tree.update(extensionsUsed=["EXT_mesh_gpu_instancing"]), "it has EXT_mesh_gpu_instancing"),
            (lambda tree: (tree.pop("scene"), tree.pop("scenes")), "it has meshes without a scene"),
            (lambda tree: tree["meshes"][0]["primitives"][0].update(attributes={}), "it has a mesh without positions"),
            (
                lambda tree: tree.update(meshes=[], nodes=[{}], accessors=[]),
                "mesh.glb has no faces, so it has no surface",
            ),
            (lambda tree: tree.update(scenes=[{}]), "mesh.glb has no faces, so it has no surface"),
        ],
    )
    def test_glb_that_is_not_read(self, change, message):
        with pytest.raises(ld.MeshError, match=message):
            ld.read_mesh("mesh.glb", self.glb(change))

    def test_headers_of_glb(self):
        good = self.glb(lambda tree: None)
        for content in (good[:4] + struct.pack("<I", 1) + good[8:], good[20:]):
            with pytest.raises(
                ld.MeshError, match=r"mesh\.glb cannot be read .* the header of a GLB file of glTF 2\.0"
            ):
                ld.read_mesh("mesh.glb", content)

    def test_glb_that_repeats_a_mesh(self, monkeypatch):
        monkeypatch.setattr(_meshes, "_MOST_CORNERS", 6000)

        def repeat(tree):
            mesh = next(node for node in tree["nodes"] if "mesh" in node)
            tree["nodes"] += [{"mesh": mesh["mesh"], "name": str(number)} for number in range(200)]

        with pytest.raises(
            ld.MeshError, match=r"mesh\.glb cannot be read as a mesh: .*its repeated meshes have more than 6000"
        ):
            ld.read_mesh("mesh.glb", self.glb(repeat))

    def test_glb_with_false_promises(self):
        def promise(tree):
            tree["accessors"][0]["count"] = 10**12

        def nothing(tree):
            for accessor in tree["accessors"]:
                del accessor["bufferView"]

        for change in (promise, nothing):
            with pytest.raises(ld.MeshError, match=r"mesh\.glb cannot be read as a mesh: .*accessors without data"):
                ld.read_mesh("mesh.glb", self.glb(change))

    def test_other_files_are_not_read(self, tmp_path):
        """Materials and buffers can name other files, here a pipe without a writer, which would block a reader."""
        os.mkfifo(tmp_path / "pipe")
        obj = f"mtllib {tmp_path}/pipe\nv 0 0 0\nv 1 0 0\nv 0 1 0\nusemtl a\nf 1 2 3\n".encode()
        (tmp_path / "mesh.obj").write_bytes(obj)
        assert len(ld.read_mesh(tmp_path / "mesh.obj")[1]) == 1

        def elsewhere(tree):
            tree["buffers"] = [{"uri": f"{tmp_path}/pipe", "byteLength": 100}]

        with pytest.raises(ld.MeshError, match=r"mesh\.glb cannot be read as a mesh"):
            ld.read_mesh("mesh.glb", self.glb(elsewhere))

    def test_ply_with_less_than_promised(self, tmp_path):
        head = "ply\nformat ascii 1.0\nelement vertex 4\nproperty float x\nproperty float y\nproperty float z\n"
        head += "element face 2\nproperty list uchar int vertex_indices\nend_header\n"
        body = "0 0 0\n1 0 0\n0 1 0\n0 0 1\n3 0 1 2\n3 0 1 3\n"
        assert len(ld.read_mesh("a.ply", (head + body).encode())[1]) == 2
        with pytest.raises(
            ld.MeshError, match=r"a\.ply cannot be read as a mesh: .*promises 2 rows of face, but there"
        ):
            ld.read_mesh("a.ply", (head + body[:-8]).encode())

    def test_folders_named_like_meshes(self, tmp_path):
        root = tmp_path / "set"
        for place in ("a/train/x.off", "a/train/y.off/z"):
            (root / place).parent.mkdir(parents=True, exist_ok=True)
            (root / place).write_bytes(off())
        assert len(ld.MeshFolder(root, points=4)) == 1
        with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
            archive.writestr("a/train/x.off", off())
            archive.writestr("a/train/y.off/", b"")
        assert len(ld.MeshFolder(tmp_path / "set.zip", points=4)) == 1

    def test_encrypted_and_flipped_members_are_named(self, tmp_path):
        path = tmp_path / "set.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a/train/x.off", off())
        good = path.read_bytes()
        flipped, encrypted = bytearray(good), bytearray(good)
        flipped[60] ^= 4
        encrypted[6] |= 1
        encrypted[encrypted.index(b"PK\x01\x02") + 8] |= 1
        for content, message in (
            (flipped, r"x\.off cannot be unpacked .Bad CRC"),
            (encrypted, "has the encrypted member"),
        ):
            path.write_bytes(content)
            with pytest.raises(ValueError, match=rf"1 of 1 files cannot be used: .*set\.zip .*{message}"):
                ld.MeshFolder(path, points=4)


def test_arrays_of_every_version_and_order(tmp_path):
    """Arrays stored by columns, big-endian, or with version 2 of the NumPy header are read correctly."""
    images = np.random.default_rng(0).integers(0, 256, (10, 28, 28), dtype=np.uint8)
    labels = io.BytesIO()
    np.lib.format.write_array(labels, np.arange(10, dtype=">i4"), version=(2, 0))
    np.savez(tmp_path / "fashion_mnist_900.npz", x=np.asfortranarray(images))
    with zipfile.ZipFile(tmp_path / "fashion_mnist_900.npz", "a") as archive:
        archive.writestr("y.npy", labels.getvalue())
    dataset = ld.FashionMNIST900(tmp_path, "all", verify=False)
    assert dataset.labels.tolist() == list(range(10))
    np.testing.assert_allclose(dataset[3].x[:, 0], images[3].ravel() / 255, atol=1e-7)
