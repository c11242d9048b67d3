"""Folders of the user's images and meshes, and places given in degrees."""

import struct
import unicodedata
import warnings
import zipfile
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

import lieattn_datasets as ld
from tests.test_data_shapes import off

Image = pytest.importorskip("PIL.Image", reason="ImageFolder needs Pillow")
SPLITS = ("train", "valid", "test")


def write_images(root, *, color=False, count=5, suffix="png", side=(6, 8)):
    """Write images of two classes, all different, and return them by name."""
    rng, found = np.random.default_rng(0), {}
    for kind in ("cat", "dog"):
        (root / kind).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            array = rng.integers(0, 256, (*side, 3) if color else side, dtype=np.uint8)
            Image.fromarray(array).save(root / kind / f"{number}.{suffix}")
            found[f"{kind}/{number}.{suffix}"] = array
    return found


def png(width, height, data=b"", bits=8, kind=0, before=(), after=()):
    """Return a PNG (gray, unless ``kind`` says otherwise) whose header may state another size than its data have."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    pixels = b"" if data is None else chunk(b"IDAT", zlib.compress(data))
    first, last = (b"".join(chunk(*each) for each in chunks) for chunks in (before, after))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + first + pixels + last + chunk(b"IEND", b"")


class TestImageFolder:
    @pytest.mark.parametrize("color", [False, True])
    def test_items_are_the_images(self, tmp_path, color):
        arrays = write_images(tmp_path, color=color)
        images = ld.ImageFolder(tmp_path, "all", color=color)
        assert images.classes == ("cat", "dog")
        assert images.labels.tolist() == [0] * 5 + [1] * 5
        for data, array in zip(images, arrays.values(), strict=True):
            expected = torch.from_numpy(array.reshape(6, 8, -1)) / 255
            torch.testing.assert_close(ld.data_to_image(data), expected)
        gray = ld.ImageFolder(tmp_path, "all", color=not color)
        assert gray.num_channels == (1 if color else 3)

    def test_seeded_splits(self, tmp_path):
        write_images(tmp_path, count=10)
        parts = [ld.ImageFolder(tmp_path, split, shares=(0.5, 0.2)) for split in SPLITS]
        assert [part.labels.bincount().tolist() for part in parts] == [[5, 5], [2, 2], [3, 3]]
        seen = {tuple(data.x.flatten().tolist()) for part in parts for data in part}
        assert len(seen) == 20
        other = ld.ImageFolder(tmp_path, "train", shares=(0.5, 0.2), split_seed=1)
        assert not torch.equal(other[0].x, parts[0][0].x) or not torch.equal(other[1].x, parts[0][1].x)

    @pytest.mark.parametrize("classes_first", [False, True])
    @pytest.mark.parametrize("names", [("train", "val", "test"), ("train", "valid", "test"), ("Train", "Val", "TEST")])
    def test_given_splits(self, tmp_path, names, classes_first):
        for name, count in zip(names, (4, 1, 2), strict=True):
            write_images(tmp_path / name, count=count)
            for kind in ("cat", "dog") if classes_first else ():
                (tmp_path / kind).mkdir(exist_ok=True)
                (tmp_path / name / kind).rename(tmp_path / kind / name)
            if classes_first:
                (tmp_path / name).rmdir()
        parts = [ld.ImageFolder(tmp_path, split) for split in SPLITS]
        assert [part.labels.bincount().tolist() for part in parts] == [[4, 4], [1, 1], [2, 2]]
        assert parts[0].classes == ("cat", "dog")

    def test_a_class_with_the_name_of_a_split(self, tmp_path):
        for part in ("train", "test"):
            write_images(tmp_path / part, count=2)
            (tmp_path / part / "cat").rename(tmp_path / part / "train")
        for part in ("train", "test"):
            images = ld.ImageFolder(tmp_path, part)
            assert (images.classes, images.labels.tolist()) == (("dog", "train"), [0, 0, 1, 1])
            assert {Path(file).parts[-3] for file in images.files} == {part}

    def test_files_of_the_items(self, tmp_path):
        arrays = write_images(tmp_path)
        for split in SPLITS:
            images = ld.ImageFolder(tmp_path, split, shares=(0.4, 0.2)).subset([1, 0])
            for file, data in zip(images.files, images, strict=True):
                name = "/".join(Path(file).parts[-2:])
                torch.testing.assert_close(data.x, torch.from_numpy(arrays[name].reshape(-1, 1)) / 255)

    def test_sizes(self, tmp_path):
        write_images(tmp_path, count=1)
        Image.fromarray(np.full((4, 4), 51, dtype=np.uint8)).save(tmp_path / "dog" / "0.JPG")
        with pytest.raises(ValueError, match=r"the argument size, got 6 x 8 \(.*0\.png\), 4 x 4 \(.*0\.JPG\)"):
            ld.ImageFolder(tmp_path, "all")
        images = ld.ImageFolder(tmp_path, "all", size=(3, 5))
        assert images.image_shape == (3, 5)
        torch.testing.assert_close(images[1].x, torch.full((15, 1), 0.2))
        assert ld.ImageFolder(tmp_path, "all", size=7).image_shape == (7, 7)

    def test_colors_of_a_printer(self, tmp_path):
        """All kinds of pixels and orientations of PNG files are drawn in tests/fuzz/images.py."""
        (tmp_path / "a").mkdir()
        gray = np.array([[0, 128], [200, 255]], dtype=np.uint8)
        plane = np.kron(gray, np.ones((8, 8), dtype=np.uint8))
        ink = np.stack([0 * plane, 0 * plane, 0 * plane, 255 - plane], axis=-1)
        Image.fromarray(ink, "CMYK").resize((2, 2), 0).save(tmp_path / "a" / "1.jpg", quality=100)
        (data,) = ld.ImageFolder(tmp_path, "all")
        assert (ld.data_to_image(data)[:, :, 0] * 255).round().tolist() == gray.tolist()

    def test_16_bits_of_gray_are_kept(self, tmp_path):
        """Also beside 8 bits, turned by EXIF, and resized."""
        (tmp_path / "a").mkdir()
        pixels = np.random.default_rng(0).integers(0, 65536, (6, 8), dtype=np.uint16)
        exif = Image.Exif()
        exif[0x0112] = 3  # to be turned by 180 degrees
        Image.fromarray(pixels).save(tmp_path / "a" / "0.png")
        Image.fromarray(pixels).save(tmp_path / "a" / "1.png", exif=exif)
        Image.fromarray(np.full((6, 8), 51, dtype=np.uint8)).save(tmp_path / "a" / "2.png")
        rows, columns = (np.maximum(1 - np.abs(np.arange(n) - (n - 1) / 2) / n, 0) for n in (6, 8))
        for color in (True, False):
            images = ld.ImageFolder(tmp_path, "all", color=color)
            assert images._images.dtype == np.uint16
            wanted = np.broadcast_to(pixels[..., None] / 65535, (6, 8, 3 if color else 1))
            for data, expected in zip(images, (wanted, wanted[::-1, ::-1], 0 * wanted + 0.2), strict=True):
                np.testing.assert_allclose(ld.data_to_image(data), expected, atol=0.51 / 65535)
            small = ld.data_to_image(ld.ImageFolder(tmp_path, "all", color=color, size=(1, 1))[0])
            mean = np.einsum("hwc,h,w->c", wanted, rows / rows.sum(), columns / columns.sum())
            np.testing.assert_allclose(small[0, 0], mean, atol=1 / 65535)

    def test_animations_are_read_as_their_first_image(self, tmp_path):
        (tmp_path / "a").mkdir()
        first, later = (Image.fromarray(np.full((4, 4), value, dtype=np.uint8)) for value in (51, 255))
        for name in ("0.png", "1.apng"):
            first.save(tmp_path / "a" / name, format="PNG", save_all=True, append_images=[later])
        assert all(torch.equal(data.x, torch.full((16, 1), 0.2)) for data in ld.ImageFolder(tmp_path, "all"))
        (tmp_path / "a" / "0.png").write_bytes(png(4, 4, None, before=[(b"acTL", bytes(8))]))
        with pytest.warns(UserWarning, match="Invalid APNG"), pytest.raises(ValueError, match="the file has no pixels"):
            ld.ImageFolder(tmp_path, "all")

    def test_transparent_palettes_cause_no_warnings(self, tmp_path):
        (tmp_path / "a").mkdir()
        pixels = np.full((4, 4, 4), [200, 100, 50, 128], dtype=np.uint8)
        Image.fromarray(pixels).quantize(4).save(tmp_path / "a" / "0.png")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = ld.ImageFolder(tmp_path, "all", color=True)
        np.testing.assert_allclose(found[0].x[0].numpy() * 255, [200, 100, 50], atol=2)

    def test_damaged_files_are_named(self, tmp_path):
        write_images(tmp_path, count=3)
        whole = (tmp_path / "cat" / "1.png").read_bytes()
        flipped = bytearray(whole)
        flipped[-20] ^= 1  # in the pixels, whose checksum is not checked elsewhere
        for content in (whole[:-30], bytes(flipped), b"GIF89a", b""):
            (tmp_path / "cat" / "1.png").write_bytes(content)
            with pytest.raises(ValueError, match=r"1 of 6 images cannot be used: .*cat.1\.png: "):
                ld.ImageFolder(tmp_path, "all")

    def test_bombs_are_refused_before_they_expand(self, tmp_path):
        """For the smaller one, Pillow only warns."""
        (tmp_path / "a").mkdir()
        for side in (10_000, 50_000):
            (tmp_path / "a" / "bomb.png").write_bytes(png(side, side))
            with pytest.raises(ValueError, match=r"bomb\.png: DecompressionBomb.*exceeds limit"):
                ld.ImageFolder(tmp_path, "all", size=8)

    @pytest.mark.parametrize("name", ["cat/notes.txt", "0.png", "cat/more/1.png", "cat/1.gif"])
    def test_other_files_are_named(self, tmp_path, name):
        write_images(tmp_path, count=2)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
        (tmp_path / "cat" / ".hidden").write_bytes(b"")
        with pytest.raises(ValueError, match=rf"expected only files CLASS/\* \(.png.*\), got {name}"):
            ld.ImageFolder(tmp_path)

    def test_links_are_followed(self, tmp_path):
        arrays = write_images(tmp_path / "elsewhere", count=2)
        (tmp_path / "set" / "cat").mkdir(parents=True)
        (tmp_path / "set" / "dog").symlink_to(tmp_path / "elsewhere" / "dog")
        (tmp_path / "set" / "cat" / "0.png").symlink_to(tmp_path / "elsewhere" / "cat" / "1.png")
        images = ld.ImageFolder(tmp_path / "set", "all")
        assert (images.classes, images.labels.tolist()) == (("cat", "dog"), [0, 1, 1])
        wanted = [arrays[name] for name in ("cat/1.png", "dog/0.png", "dog/1.png")]
        found = [(ld.data_to_image(data)[:, :, 0] * 255).round().numpy() for data in images]
        np.testing.assert_array_equal(found, wanted)

    def test_broken_links_are_named(self, tmp_path):
        write_images(tmp_path, count=1)
        (tmp_path / "cat" / "1.png").symlink_to("nowhere.png")
        with pytest.raises(ValueError, match=r"1 of 3 images cannot be used: .*cat.1\.png: FileNotFoundError"):
            ld.ImageFolder(tmp_path, "all")

    def test_links_to_a_folder_above_end(self, tmp_path):
        write_images(tmp_path, count=1)
        (tmp_path / "cat" / "up").symlink_to(tmp_path)
        with pytest.raises(ValueError, match=r"expected only files CLASS/\* .*, got cat.up.cat.0\.png"):
            ld.ImageFolder(tmp_path, "all")

    def test_sizes_of_numpy(self, tmp_path):
        write_images(tmp_path, count=2)
        assert ld.ImageFolder(tmp_path, "all", size=np.int64(5)).image_shape == (5, 5)
        assert ld.ImageFolder(tmp_path, "all", size=np.array([5, 6])).image_shape == (5, 6)

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"size": 0}, ValueError, "size: expected one or two numbers of pixels of at least 1, got 0"),
            ({"size": (3, 3, 3)}, ValueError, "size: expected one or two numbers"),
            ({"size": "8"}, TypeError, "size: expected"),
            ({"shares": (0.9, 0.2)}, ValueError, "shares: expected those of train and valid"),
            ({"shares": (80, 10), "split": "all"}, ValueError, "shares: expected those of train and valid"),
            (
                {"shares": (1.0, 0.0), "split": "test"},
                ValueError,
                "shares: expected at least one of the . examples for split=.test.",
            ),
            ({"split": "val"}, ValueError, "split: expected one of"),
            ({"root": "none"}, FileNotFoundError, "there is no folder 'none' of images"),
        ],
    )
    def test_bad_arguments(self, tmp_path, options, error, message):
        write_images(tmp_path, count=2)
        with pytest.raises(error, match=message):
            ld.ImageFolder(**{"root": tmp_path, **options})

    def test_no_images(self, tmp_path):
        (tmp_path / "cat").mkdir()
        with pytest.raises(FileNotFoundError, match=r"there are no images CLASS/\*"):
            ld.ImageFolder(tmp_path)


class TestMeshFolder:
    def write(self, root, *names):
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(off())
        return root

    def test_classes_without_splits(self, tmp_path):
        self.write(tmp_path, *(f"{kind}/{number}.off" for kind in ("bed", "sofa") for number in range(5)))
        parts = [ld.MeshFolder(tmp_path, split, points=4, shares=(0.6, 0.2)) for split in SPLITS]
        assert [part.labels.tolist() for part in parts] == [[0, 0, 0, 1, 1, 1], [0, 1], [0, 1]]
        assert parts[0].classes == ("bed", "sofa")

    @pytest.mark.parametrize("train", ["train", "Train"])
    @pytest.mark.parametrize("classes", [("bed",), ("bed", "sofa")])
    def test_given_splits(self, tmp_path, classes, train):
        self.write(tmp_path, *(f"{kind}/{train}/{number}.off" for kind in classes for number in range(3)))
        self.write(tmp_path, *(f"{kind}/Test/0.off".replace("T", train[0]) for kind in classes))
        parts = [ld.MeshFolder(tmp_path, split, points=4, validation=1) for split in SPLITS]
        assert [len(part) for part in parts] == [3 * len(classes) - 1, 1, len(classes)]
        assert all(part.classes == classes for part in parts)
        written = sorted(str(path) for path in tmp_path.rglob("*.off"))
        assert sorted(file for part in parts for file in part.files) == written

    @pytest.mark.parametrize("name", ["val", "Valid", "validation"])
    @pytest.mark.parametrize("layout", ["{kind}/{part}/0.off", "{part}/{kind}/0.off", "set/{part}/{kind}/0.off"])
    def test_both_orders_of_splits_and_classes(self, tmp_path, layout, name):
        parts = {"train": "train", "valid": name, "test": "test"}
        kinds = ("bed", "sofa")
        self.write(tmp_path, *(layout.format(kind=kind, part=part) for kind in kinds for part in parts.values()))
        for split, part in parts.items():
            found = ld.MeshFolder(tmp_path, split, points=4)
            assert (found.classes, found.labels.tolist()) == (kinds, [0, 1])
            assert all(f"/{part}/" in Path(file).as_posix() for file in found.files)
        with pytest.raises(ValueError, match="validation: expected 0 for a folder with a split of its own, got 1"):
            ld.MeshFolder(tmp_path, points=4, validation=1)

    def test_files_alone(self, tmp_path):
        """Files without subfolders: one class, or classes or targets given by file name."""
        names = [f"{number}.off" for number in range(4)]
        folder = self.write(tmp_path / "parts", *names)
        shares = {"points": 4, "shares": (1.0, 0.0)}
        assert ld.MeshFolder(folder, **shares).classes == ("parts",)
        kinds = ld.MeshFolder(folder, labels=dict(zip(names, "abba", strict=True)), **shares)
        assert (kinds.classes, kinds.labels.tolist()) == (("a", "b"), [0, 1, 1, 0])
        drag = ld.MeshFolder(folder, labels=dict(zip(names, (0.1, 2, 3, 4), strict=True)), **shares)
        torch.testing.assert_close(torch.cat([data.y for data in drag]), torch.tensor([[0.1], [2.0], [3.0], [4.0]]))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"labels": {"0.off": "a"}}, "got no label for 1.off"),
            ({"labels": {"0.off": "a", "1.off": "b", "2.off": "b"}}, "got no file for 2.off"),
            ({"labels": {"0.off": "a", "1.off": 1.0}}, "labels: expected all strings .* or all numbers .* got both"),
            ({"labels": {"0.off": 1.0, "1.off": np.nan}}, "targets: expected finite"),
            ({"validation": 1}, "validation: expected 0 for a folder without CLASS/train"),
        ],
    )
    def test_bad_arguments(self, tmp_path, options, message):
        self.write(tmp_path, "0.off", "1.off")
        with pytest.raises(ValueError, match=message):
            ld.MeshFolder(tmp_path, points=4, shares=(1.0, 0.0), **options)

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            (("a/train/0.off", "a/test/1.off", "a/dev/2.off"), r"meshes that are in no split: a/dev/2\.off"),
            (("train/a/0.off", "test/a/1.off", "b/2.off"), r"meshes that are in no split: b/2\.off"),
            (("a/train/0.off", "a/test/1.off", "b/2.off"), r"meshes that are in no split: b/2\.off"),
            (("a/0.off", "1.off"), r"with all classes in one folder, got 1\.off, a/0\.off"),
            (("a/x/0.off", "b/x/1.off"), r"expected meshes CLASS/\* or only files, .*got a/x/0\.off, b/x/1\.off"),
            (("a/0.off", "a/b/c/d/1.off"), r"all classes in one folder, got a/0\.off, a/b/c/d/1\.off"),
            (("a/x/train/0.off", "b/x/test/1.off"), r"all classes in one folder, got a/x/train/0\.off, b/x/test/1"),
            (("a/Train/0.off", "b/2.off"), r"all classes in one folder, got a/Train/0\.off, b/2\.off"),
        ],
    )
    def test_splits_are_neither_mixed_nor_left_out(self, tmp_path, names, message):
        self.write(tmp_path, *names)
        with pytest.raises(ValueError, match=message):
            ld.MeshFolder(tmp_path, points=4, shares=(1.0, 0.0))

    def test_hidden_folders_are_no_classes(self, tmp_path):
        self.write(tmp_path / "set", "a/0.off", ".trash/1.off", "b/.2.off")
        assert ld.MeshFolder(tmp_path / "set", points=4).classes == ("a",)
        with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
            for name in ("set/a/0.off", "set/.trash/1.off", "set/b/.2.off"):
                archive.writestr(name, off())
        assert ld.MeshFolder(tmp_path / "set.zip", points=4).classes == ("a",)

    def test_class_with_the_name_of_the_folder(self, tmp_path, monkeypatch):
        folder = self.write(tmp_path / "parts v1.2", "0.off")
        assert ld.MeshFolder(folder, points=4).classes == ("parts v1.2",)
        monkeypatch.chdir(folder)
        assert ld.MeshFolder(".", points=4).classes == ("parts v1.2",)

    def test_broken_links_are_named(self, tmp_path):
        self.write(tmp_path, "a/0.off")
        (tmp_path / "a" / "1.off").symlink_to("nowhere.off")
        with pytest.raises(ValueError, match=r"1 of 2 files cannot be used: .*No such file.*1\.off"):
            ld.MeshFolder(tmp_path, points=4, shares=(1.0, 0.0))

    def test_archive_of_modelnet_in_capitals(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "MODELNET10.ZIP", "w") as archive:
            archive.writestr("ModelNet10/bed/train/bed_0001.off", off())
        assert ld.ModelNet(tmp_path, points=4, verify=False).classes == ("bed",)
        with pytest.raises(FileNotFoundError, match=r"ModelNet10\.zip in root=.*; this is a file, not a folder"):
            ld.ModelNet(tmp_path / "MODELNET10.ZIP", points=4, verify=False)

    def test_no_meshes(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"there are no meshes or scans CLASS/\* or \* "):
            ld.MeshFolder(tmp_path)


WRITTEN = {
    "slashes": lambda name: name,
    "backslashes": lambda name: name.replace("/", "\\"),
    "drive": lambda name: "C:\\data\\" + name.replace("/", "\\"),
    "share": lambda name: "\\\\server\\data\\" + name.replace("/", "\\"),
    "absolute": lambda name: f"//data/{name}",
    "dots": lambda name: f"./x/.././{name.replace('/', '//./')}",
    "above": lambda name: f"../../{name}",
    "blanks": lambda name: name.replace("/", " /") + " ",
    "dots at the end": lambda name: name.replace("/", "./") + ".",
    "capitals": lambda name: name.replace("train", "TRAIN").replace("test", "Test").replace("off", "OFF"),
    "both": lambda name: name.replace("/", "\\", 1),
    "accents": lambda name: unicodedata.normalize("NFD", name),
}


class TestNamesOfFiles:
    """Names of other systems, in archives, or as unpackers leave them on disk."""

    NAMES = tuple(
        f"{kind}/{split}/{n}.off" for kind in ("chaise é", "table") for split in ("train", "test") for n in (0, 1)
    )

    @pytest.mark.parametrize("how", WRITTEN)
    def test_archives_of_meshes(self, tmp_path, how):
        with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
            for name in self.NAMES:
                member = zipfile.ZipInfo("member")
                member.filename = WRITTEN[how](name)
                archive.writestr(member, off())
            folder = zipfile.ZipInfo("member")
            folder.filename = WRITTEN[how]("table/train") + ("\\" if how == "backslashes" else "/")
            archive.writestr(folder, b"")
            archive.writestr("__MACOSX/table/train/0.off", b"junk")
        for split in ("train", "test"):
            data = ld.MeshFolder(tmp_path / "set.zip", split, points=4)
            assert data.classes == ("chaise é", "table")
            assert data.labels.tolist() == [0, 0, 1, 1]
            assert {Path(name).parts[-2].lower() for name in data.files} == {split}

    @pytest.mark.parametrize(
        "how", ["slashes", "backslashes", "drive", "blanks", "dots at the end", "capitals", "both"]
    )
    def test_folders(self, tmp_path, how):
        for name in self.NAMES:
            path = tmp_path / "set" / WRITTEN[how](name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(off())
        data = ld.MeshFolder(tmp_path / "set", points=4)
        assert (data.classes, data.labels.tolist()) == (("chaise é", "table"), [0, 0, 1, 1])
        assert all(Path(name).read_bytes() == off() for name in data.files)
        drag = {WRITTEN[how](name): 1.0 for name in self.NAMES}
        assert len(ld.MeshFolder(tmp_path / "set", points=4, labels=drag)) == 4
        for name in write_images(tmp_path / "plain"):
            path = tmp_path / "images" / WRITTEN[how](name).replace("data\\", "")
            path.parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "plain" / name).rename(path)
        images = ld.ImageFolder(tmp_path / "images", "all")
        assert (images.classes, len(images)) == (("cat", "dog"), 10)

    def test_the_same_name(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
            archive.writestr("a/0.off", off())
            archive.writestr("./a/0.off", off())
        with pytest.raises(ValueError, match=r"set\.zip is not a valid zip archive: members have the same name"):
            ld.MeshFolder(tmp_path / "set.zip", points=4)
        for name in ("0.off", "0.off "):
            (tmp_path / "set" / "a").mkdir(parents=True, exist_ok=True)
            (tmp_path / "set" / "a" / name).write_bytes(off())
        with pytest.raises(
            ValueError, match=r"0\.off ' and '.*0\.off' have the same name on other systems: rename one"
        ):
            ld.MeshFolder(tmp_path / "set", points=4)


class TestMeshFormats:
    @pytest.mark.parametrize("order", ["little", "big"])
    @pytest.mark.parametrize("kind", ["uchar", "int"])
    def test_binary_ply_with_several_polygons(self, order, kind):
        """The second file has the length of one with three squares."""
        sign, code = "<" if order == "little" else ">", {"uchar": "B", "int": "i"}[kind]
        corners = [(np.cos(angle), np.sin(angle), 0, 7) for angle in np.arange(8) * np.pi / 4]
        for polygons in ([(0, 1, 2, 3), (0, 3, 4)], [(0, 1, 2, 3), (0, 3, 4), (0, 4, 5, 6, 7)]):
            header = (
                f"ply\nformat binary_{order}_endian 1.0\ncomment element\nelement vertex 8\nproperty double x\n"
                "property double y\nproperty double z\nproperty uchar red\n"
                f"element face {len(polygons)}\nproperty list {kind} {kind} vertex_indices\nproperty short part\n"
                "element edge 1\nproperty int vertex1\nend_header\n"
            )
            body = b"".join(struct.pack(f"{sign}dddB", *corner) for corner in corners)
            for polygon in polygons:
                body += struct.pack(f"{sign}{len(polygon) + 1}{code}h", len(polygon), *polygon, 1)
            content = header.encode() + body + bytes(4)
            vertices, faces = ld.read_mesh("scan.ply", content)
            np.testing.assert_array_equal(vertices, np.array(corners)[:, :3])
            wanted = {(polygon[0], *pair) for polygon in polygons for pair in pairwise(polygon[1:])}
            turned = {tuple(np.roll(face, -int(np.argmin(face))).tolist()) for face in faces}
            assert turned == wanted
            for damaged in (content[:-1], content + b"0", content[: len(header) + 50]):
                with pytest.raises(ld.MeshError, match=r"scan\.ply cannot be read as a mesh"):
                    ld.read_mesh("scan.ply", damaged)

    def test_stl_that_is_cut_off(self):
        """trimesh would return the first solid."""
        trimesh = pytest.importorskip("trimesh")
        box = trimesh.creation.box()
        text, binary = box.export(file_type="stl_ascii"), box.export(file_type="stl")
        assert len(ld.read_mesh("box.stl", f"{text}\n{text}".encode())[1]) == 24
        for content in (text + "\n" + text[: len(text) // 2], text[: len(text) // 2], binary[:-50], binary + b"0"):
            content = content if isinstance(content, bytes) else content.encode()
            with pytest.raises(
                ld.MeshError, match=r"box\.stl cannot be read as a mesh: .* triangles( of \d+)? can be read"
            ):
                ld.read_mesh("box.stl", content)


class TestOnSphere:
    def test_places(self):
        found = ld.on_sphere([0, 0, 0, 90, -90, 45], [0, 90, -180, 12, 12, 0])
        half = 0.5**0.5
        expected = [[1, 0, 0], [0, 1, 0], [-1, 0, 0], [0, 0, 1], [0, 0, -1], [half, 0, half]]
        torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=1e-7)

    def test_tables_and_units(self):
        expected = ld.on_sphere([1.0, 50.0], [0.3, 6.0])
        for names in (("lat", "lon"), ("Latitude", "Longitude"), ("LAT", "lng")):
            columns = dict(zip(names, ([1.0, 50.0], [0.3, 6.0]), strict=True))
            assert torch.equal(ld.on_sphere(columns), expected)
        radians = ld.on_sphere(*np.deg2rad([[1.0, 50.0], [0.3, 6.0]]), units="radians")
        torch.testing.assert_close(radians, expected)
        assert torch.equal(ld.on_sphere([1.0], [0.3], units="degrees"), expected[:1])
        torch.testing.assert_close(ld.on_sphere([0.0], [0.0]), torch.tensor([[1.0, 0.0, 0.0]]))

    def test_areas_of_grids(self):
        """Between equally spaced rings they are cosines; rows of pixels have no poles, grids with poles have caps."""
        latitude, longitude = np.arange(-87.5, 90, 5), np.arange(0, 360, 5)
        pixels = [angles.reshape(-1) for angles in np.meshgrid(latitude, longitude, indexing="ij")]
        cosine = torch.from_numpy(np.cos(np.deg2rad(pixels[0])))
        found = ld.areas_on_sphere(*pixels)
        torch.testing.assert_close(found, (cosine / cosine.mean()).float(), rtol=1e-6, atol=0)
        order = torch.randperm(len(found)).numpy()
        assert torch.equal(ld.areas_on_sphere(*(angles[order] for angles in pixels)), found[order])
        # The mean of z² over the sphere is 1/3, of a polynomial of even degree also with caps at the poles.
        with_poles = [angles.reshape(-1) for angles in np.meshgrid(np.arange(90, -91, -5), longitude, indexing="ij")]
        area, z = ld.areas_on_sphere(*with_poles), ld.on_sphere(*with_poles)[:, 2]
        assert float((area * z.square()).mean()) == pytest.approx(1 / 3, abs=1e-3)
        assert float(area.min()) > 0
        assert float(area.mean()) == pytest.approx(1, abs=1e-6)
        region = ld.areas_on_sphere([50.0, 50.0, 60.0, 60.0], [0.0, 9.0, 0.0, 9.0])
        assert float(region[0] / region[2]) == pytest.approx(np.cos(np.deg2rad(50)) / 0.5, rel=1e-6)
        reduced = ld.areas_on_sphere([45.0] * 4 + [0.0] * 8 + [-45.0] * 4, [0.0, 90.0, 180.0, 270.0] * 4)
        assert float(reduced[0] / reduced[4]) == pytest.approx(2 * np.cos(np.pi / 4), rel=1e-6)

    @pytest.mark.parametrize(("latitude", "longitude"), [([10.0, 20.0, 20.0], [0.0] * 3), ([10.0] * 3, [0.0] * 3)])
    def test_areas_of_stations(self, latitude, longitude):
        with pytest.raises(ValueError, match=r"latitude: expected rings of equal latitude with several points each"):
            ld.areas_on_sphere(latitude, longitude)

    @pytest.mark.parametrize(
        ("latitude", "longitude", "message"),
        [
            ([0.0, 91.0], [0.0, 0.0], r"latitude: expected degrees in -90 .. 90, got 91 for point 1"),
            ([0.0], [361.0], r"longitude: expected degrees in -360 .. 360, got 361 for point 0"),
            ([0.0], [0.0, 1.0], r"expected \[points\] both, got \[1\] and \[2\]"),
            ([1.0, np.nan], [0.0], r"latitude: expected finite numbers, got NaN or infinity, the first at \[1\]"),
            ([0.0, 1.0], np.ma.masked_array([1, 2], [0, 1]), r"longitude: .* values that are missing .*, 1 of 2"),
            (["N"], [0.0], "latitude: expected an array of real numbers"),
            ([1.0, 0.5], [0.3, 2.0], "got 0.5 .. 1 and 0.3 .. 2, which can be either, .* units='degrees' or"),
            ({"lat": [1.0], "latitude": [1.0]}, None, "one of the names latitude, .*, got latitude, lat"),
            ({"lat": [1.0]}, None, "longitude: expected one of the names longitude, lon, .*, got lat"),
            ([1.0], None, "latitude: expected angles, or a table with them, got list alone"),
        ],
    )
    def test_bad_places(self, latitude, longitude, message):
        with pytest.raises(ValueError, match=message):
            ld.on_sphere(latitude, longitude)
