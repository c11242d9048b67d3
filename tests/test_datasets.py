"""lieattn_datasets, with files that the tests write in the official formats."""

import gzip
import hashlib
import math
import pickle
import struct
import zipfile
from functools import cached_property

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.transforms import Compose

import lieattn_datasets as ld
from lieattn_datasets import _mnist
from tests.cases import refuses

RANDOM = np.random.default_rng(0)
GRAY = RANDOM.integers(0, 256, (12, 28, 28), dtype=np.uint8)
COLOR = RANDOM.integers(0, 256, (10, 32, 32, 3), dtype=np.uint8)
LABELS = np.arange(12, dtype=np.uint8) % 10
PCAM_X, PCAM_Y = (f"camelyonpatch_level_2_split_test_{part}.h5" for part in "xy")
AMAT = "mnist_all_rotation_normalized_float_train_valid.amat"


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_idx(root, prefix="train", images=GRAY, labels=LABELS, pack=False):
    for name, array in ((f"{prefix}-images-idx3-ubyte", images), (f"{prefix}-labels-idx1-ubyte", labels)):
        content = idx(array)
        if pack:
            (root / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (root / name).write_bytes(content)


def amat(images, labels):
    rows = np.column_stack([images.transpose(0, 2, 1).reshape(len(images), -1) / 256, labels])
    return "".join("   " + "   ".join(f"{value:.7e}" for value in row) + "\n" for row in rows)


def cifar(images, labels, coarse=b""):
    """Return rows of the official binary version: labels, then the red, the green and the blue plane."""
    planes = images.transpose(0, 3, 1, 2)
    return b"".join(coarse + bytes([label]) + image.tobytes() for image, label in zip(planes, labels, strict=True))


def write_cifar(root, names=(*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"), coarse=b""):
    for name in names:
        (root / name).write_bytes(cifar(COLOR, LABELS[:10], coarse))


def write_pcam(root, images=None, labels=None):
    h5py = pytest.importorskip("h5py")
    images = RANDOM.integers(0, 256, (5, 96, 96, 3), dtype=np.uint8) if images is None else images
    labels = np.array([0, 1, 1, 0, 1], dtype=np.uint8) if labels is None else labels
    with h5py.File(root / PCAM_X, "w") as file:
        file["x"] = images
    with h5py.File(root / PCAM_Y, "w") as file:
        file["y"] = labels.reshape(-1, 1, 1, 1)
    return images, labels


def image_of(data):
    return ld.data_to_image(data).numpy()


def small_images(count=6, height=3, width=4):
    images = np.arange(count * height * width, dtype=np.uint8).reshape(count, height, width)
    return ld.ImagePoints(images, np.arange(count) % 3)


class TurnedInWorkers(torch.utils.data.Dataset):
    """Four clouds of one point, turned by a transform that each process constructs where it is first used."""

    @cached_property
    def turn(self):
        return ld.RandomRotatePoints()

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.turn(Data(pos=torch.tensor([[1.0, 0.0]])))


class TestImages:
    def test_format_of_the_contract(self):
        data = ld.image_to_data(np.array([[0, 51, 102], [153, 204, 255]], dtype=np.uint8), label=7)
        torch.testing.assert_close(data.x, torch.tensor([[0.0], [0.2], [0.4], [0.6], [0.8], [1.0]]))
        expected = [[-1, 0.5], [0, 0.5], [1, 0.5], [-1, -0.5], [0, -0.5], [1, -0.5]]
        assert data.pos.tolist() == expected
        assert data.grid.tolist() == [[2, 3]]
        assert data.y.tolist() == [7]
        assert [data.x.dtype, data.pos.dtype, data.y.dtype, data.grid.dtype] == [torch.float32] * 2 + [torch.int64] * 2

    def test_color_floats_and_back(self):
        image = RANDOM.random((3, 5, 3))
        data = ld.image_to_data(image)
        assert data.x.shape == (15, 3)
        assert "y" not in data
        np.testing.assert_allclose(image_of(data), image, atol=1e-7)

    def test_geometry_is_shared_and_images_stay_bytes(self):
        dataset = small_images()
        assert dataset[0].pos.data_ptr() == dataset[5].pos.data_ptr()
        assert dataset._images.dtype == np.uint8
        assert len(pickle.dumps(dataset)) < 2_000

    def test_views(self):
        dataset = small_images()
        view = dataset.subset([4, -1, 0]).subset(torch.tensor([0, 2]))
        assert [int(data.x[0] * 255) for data in view] == [48, 0]
        assert view.labels.tolist() == [1, 0]
        turned = view.with_transform(ld.RotatePoints(math.pi))
        assert torch.equal(turned[0].pos, -dataset[4].pos)
        assert view.transform is None
        assert len(dataset) == 6
        assert repr(view) == "ImagePoints(2 images of 3 x 4 x 1, 3 classes)"
        assert (view.num_channels, view.image_shape, view.num_classes) == (1, (3, 4), 3)

    def test_statistics(self):
        dataset = ld.ImagePoints(COLOR, LABELS[:10])
        mean, std = dataset.statistics()
        np.testing.assert_allclose(mean, COLOR.mean(axis=(0, 1, 2)) / 255)
        np.testing.assert_allclose(std, COLOR.std(axis=(0, 1, 2)) / 255)
        values = torch.cat([data.x for data in dataset.with_transform(ld.Standardize(mean, std))])
        torch.testing.assert_close(values.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
        torch.testing.assert_close(values.std(0, correction=0), torch.ones(3), atol=1e-5, rtol=0)
        low = ld.ImagePoints(COLOR[:, :2], LABELS[:10]).subset([1, 4])
        np.testing.assert_allclose(low.statistics()[0], COLOR[[1, 4], :2].mean(axis=(0, 1, 2)) / 255)

    @pytest.mark.parametrize(
        ("make", "error", "message"),
        [
            (lambda: ld.ImagePoints(GRAY[0], [0]), ValueError, "images: expected .images, height, width"),
            (lambda: ld.ImagePoints(GRAY, LABELS[:3]), ValueError, "one per image, .12., got .3.$"),
            (
                lambda: ld.ImagePoints(np.moveaxis(GRAY, 0, 2), LABELS),
                ValueError,
                r"one per image, \[28\], got \[12\]; if axis 2 counts the images, use np.moveaxis\(images, 2, 0\)",
            ),
            (lambda: ld.ImagePoints(GRAY, LABELS, channels=28), ValueError, "channels: expected 1 for .* got 28"),
            (lambda: ld.ImagePoints(np.ma.masked_equal(GRAY, 7), LABELS), ValueError, "images: .* are missing .masked"),
            (lambda: ld.ImagePoints(GRAY > 9, LABELS), TypeError, "uint8, uint16 or a floating dtype, got bool"),
            (lambda: ld.ImagePoints(GRAY, LABELS * 0.5), TypeError, "labels: expected integers, got float64"),
            (lambda: ld.ImagePoints(GRAY, LABELS, num_classes=5), ValueError, "4 .num_classes - 1., got 0 .. 9"),
            (lambda: ld.ImagePoints(GRAY, LABELS.astype(int) - 1), ValueError, "0 .. 8 .num_classes - 1., got -1 .. 8"),
            (lambda: ld.ImagePoints(GRAY.astype(np.int32), LABELS), TypeError, "floating dtype, got int32"),
            (lambda: ld.ImagePoints(list(GRAY.astype(int)), LABELS), TypeError, "floating dtype, got int64"),
            (lambda: ld.image_to_data([[0, 255]]), TypeError, r"got int64; .* images.astype\('uint8'\)"),
            (lambda: ld.ImagePoints(GRAY / 1.0, LABELS), ValueError, r"in \[0, peak=1\], got values 0 .. 255"),
            (lambda: ld.ImagePoints(GRAY * np.nan, LABELS), ValueError, "images: expected finite"),
            (lambda: ld.ImagePoints(GRAY, LABELS, peak=16), ValueError, r"in \[0, peak=16\]"),
            (lambda: ld.ImagePoints(GRAY, LABELS, peak=0), ValueError, "peak: expected a positive finite number"),
            (lambda: ld.ImagePoints(GRAY, LABELS, peak=np.inf), ValueError, "peak: expected a positive finite number"),
            (lambda: ld.image_to_data(np.zeros(3)), ValueError, r"got \[3\]"),
            (lambda: ld.grid_positions(0, 3), ValueError, "at least 1, got 0 and 3"),
            (lambda: small_images()[6], IndexError, "index: expected an integer in -6 .. 5, got 6"),
            (lambda: small_images()[0:2], TypeError, "use subset for several"),
            (lambda: small_images().subset([7]), IndexError, "in -6 .. 5, got 7"),
            (lambda: small_images().subset([True] * 6), TypeError, "list of integers"),
            (lambda: small_images().subset([]).statistics(), ValueError, "at least one image"),
            (lambda: ld.data_to_image(Data()), ValueError, "with x, pos and grid, got no x and no pos and no grid"),
            (lambda: image_of(ld.RotatePoints(1)(small_images()[0])), ValueError, "expected the upright pixel"),
            (lambda: image_of(next(iter(DataLoader(small_images(), 2)))), ValueError, "one image"),
        ],
    )  # fmt: skip
    def test_bad_input(self, make, error, message):
        with pytest.raises(error, match=message):
            make()

    @pytest.mark.parametrize(
        ("shape", "other", "advice"),
        [
            ((2, 28, 28, 28), "images, depth, height, width", "make a Data of each volume"),
            ((5, 5, 5, 5), "images, depth, height, width", "make a Data of each volume"),
            ((2, 1, 5, 6), "images, channels, height, width", r"use permute\(0, 2, 3, 1\) of a tensor"),
            ((9, 8, 3), "height, width, channels", r"use images\[None\]"),
            ((8, 9, 8), "height, width, images", r"use np.moveaxis\(images, 2, 0\)"),
        ],
    )
    def test_several_images_in_another_order(self, shape, other, advice):
        images, labels = np.random.default_rng(0).random(shape), np.zeros(shape[0], dtype=int)
        with pytest.raises(ValueError, match=rf"images: expected .*, which can also be \[{other}\]; {advice}"):
            ld.ImagePoints(images, labels)
        channels = shape[3] if len(shape) == 4 else 1
        data = ld.ImagePoints(images, labels, channels=channels)[1]
        np.testing.assert_allclose(image_of(data), images[1].reshape(*shape[1:3], channels), atol=1e-7)

    @pytest.mark.parametrize(
        ("shape", "other", "advice"),
        [
            ((1, 5, 6), "channels, height, width", r"use permute\(1, 2, 0\) of a tensor"),
            ((9, 8, 7), "images, height, width", "use ImagePoints"),
        ],
    )
    def test_one_image_in_another_order(self, shape, other, advice):
        image = np.random.default_rng(0).random(shape)
        with pytest.raises(ValueError, match=rf"image: expected .*, which can also be \[{other}\]; {advice}"):
            ld.image_to_data(image)
        np.testing.assert_allclose(image_of(ld.image_to_data(image, channels=shape[2])), image, atol=1e-7)

    @pytest.mark.parametrize("shape", [(3, 9, 9, 3), (3, 3, 3, 3), (6, 3, 4), (3, 9, 9), (9, 8, 7), (2, 5, 5, 4)])
    def test_usual_orders_need_no_word(self, shape):
        images = np.random.default_rng(0).integers(0, 65536, shape, dtype=np.uint16)
        data = ld.ImagePoints(images, np.zeros(shape[0], dtype=int))[1]
        assert np.array_equal(np.rint(image_of(data) * 65535), images[1].reshape(*shape[1:3], -1))


class TestDigits:
    def test_splits(self):
        pytest.importorskip("sklearn")
        parts = [ld.Digits(split) for split in ("train", "valid", "test")]
        assert [len(part) for part in parts] == [1078, 360, 359]
        indices = np.concatenate([part._indices for part in parts])
        assert sorted(indices) == list(range(1797))
        for part in parts:
            shares = part.labels.bincount() / len(part)
            assert (shares - ld.Digits("all").labels.bincount() / 1797).abs().max() < 0.004
        # published results depend on the split, so it must never change
        digest = hashlib.sha256(np.concatenate([part._indices for part in parts]).tobytes()).hexdigest()
        assert digest.startswith("83f81cac46ae72b7")
        every = ld.Digits("all")
        content = every._images.tobytes() + every.labels.numpy().astype(np.uint8).tobytes()
        assert hashlib.sha256(content).hexdigest().startswith("87ff0c9e40dc7e2c")  # and on scikit-learn's images
        assert every[0].x.shape == (64, 1)
        assert every[0].x.max() == 15 / 16
        with pytest.raises(ValueError, match=r"split: expected one of \('train', 'valid', 'test', 'all'\), got 'val'"):
            ld.Digits("val")


class TestIdx:
    @pytest.mark.parametrize("pack", [False, True])
    @pytest.mark.parametrize(("kind", "folder"), [(ld.MNIST, "MNIST/raw"), (ld.FashionMNIST, "")])
    def test_reads(self, tmp_path, pack, kind, folder):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        write_idx(tmp_path / folder, "t10k", pack=pack)
        dataset = kind(tmp_path, "test", validation=4, verify=False)  # of the training images only
        assert torch.equal(dataset.labels, torch.from_numpy(LABELS.astype(np.int64)))
        np.testing.assert_allclose(image_of(dataset[3])[..., 0], GRAY[3] / 255, atol=1e-7)

    def test_validation(self, tmp_path):
        write_idx(tmp_path)
        train, valid = (ld.MNIST(tmp_path, s, validation=4, verify=False)._indices for s in ("train", "valid"))
        assert sorted([*train, *valid]) == list(range(12))
        assert valid.tolist() == ld.MNIST(tmp_path, "valid", validation=4, verify=False)._indices.tolist()
        assert valid.tolist() == sorted(np.random.RandomState(2024).permutation(12)[-4:])  # in every version
        with pytest.raises(ValueError, match="validation: expected at least 1 for split='valid'"):
            ld.MNIST(tmp_path, "valid", verify=False)
        with pytest.raises(ValueError, match="less than the 12 training images, got 12"):
            ld.MNIST(tmp_path, validation=12, verify=False)

    def test_checksum_and_count(self, tmp_path, monkeypatch):
        write_idx(tmp_path, pack=True)
        with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.gz has the digest md5:\w+, but .* Replace"):
            ld.MNIST(tmp_path)
        digests = _mnist._MNIST.digests
        for name, array in (("images-idx3", GRAY), ("labels-idx1", LABELS)):
            known = "md5:" + hashlib.md5(idx(array)).hexdigest()
            monkeypatch.setitem(digests, f"train-{name}-ubyte", known)
        with pytest.raises(ValueError, match="holds 12 images, but the official file holds 60000"):
            ld.MNIST(tmp_path)
        monkeypatch.setitem(ld.MNIST._counts, "train", 12)
        assert len(ld.MNIST(tmp_path)) == 12
        write_idx(tmp_path, "t10k")
        with pytest.raises(ValueError, match="it is the content of train-images-idx3-ubyte"):
            ld.MNIST(tmp_path, "test")

    def test_npz(self, tmp_path):
        np.savez(tmp_path / "mnist.npz", x_train=GRAY, y_train=LABELS, x_test=GRAY[:3], y_test=LABELS[:3])
        assert len(ld.MNIST(tmp_path, "test", verify=False)) == 3
        with pytest.raises(ValueError, match=r"mnist.npz has the digest content:"):
            ld.MNIST(tmp_path)
        write_idx(tmp_path, "t10k")
        assert len(ld.MNIST(tmp_path, "test", verify=False)) == 12

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda c: c[:-1], "has 9407 bytes after its header, but the header promises 9408"),
            (lambda c: c + b"\0", "has more bytes after its header, but the header promises 9408"),
            (lambda c: c[:10], "starts with the bytes 00000803"),
            (lambda c: b"", r"starts with the bytes \(none\)"),
            (lambda c: b"\0\0\x0d\x03" + c[4:], "starts with the bytes 00000d03"),
            (lambda c: idx(GRAY[:, :14].copy()), r"12 items of shape \(14, 28\), expected uint8 of \(28, 28\)"),
            (lambda c: idx(GRAY[:5]), "labels-idx1-ubyte does not hold one label in 0 .. 9 for each of the 5"),
        ],
    )
    def test_damaged(self, tmp_path, damage, message):
        write_idx(tmp_path)
        path = tmp_path / "train-images-idx3-ubyte"
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(ValueError, match=message) as caught:
            ld.MNIST(tmp_path, verify=False)
        assert str(tmp_path) in str(caught.value)
        assert "The official files are" in str(caught.value)

    def test_damaged_gzip_and_labels(self, tmp_path):
        write_idx(tmp_path, labels=LABELS + 1)
        with pytest.raises(ValueError, match=r"does not hold one label in 0 \.\. 9"):
            ld.MNIST(tmp_path, verify=False)
        (tmp_path / "train-images-idx3-ubyte").unlink()
        path = tmp_path / "train-images-idx3-ubyte.gz"
        for content in (gzip.compress(idx(GRAY))[:-20], b"no gzip", gzip.compress(idx(GRAY))[:40] + b"\xff" * 99):
            path.write_bytes(content)
            with pytest.raises(ValueError, match="is not a complete gzip file"):
                ld.MNIST(tmp_path, verify=False)


class TestRotatedMNIST:
    def test_official_rows_and_orientation(self, tmp_path):
        (tmp_path / "mnist_rotation_new").mkdir()
        (tmp_path / "mnist_rotation_new" / AMAT).write_text(amat(GRAY, LABELS))
        train = ld.RotatedMNIST(tmp_path, verify=False)
        valid = ld.RotatedMNIST(tmp_path, "valid", verify=False)
        assert [len(train), len(valid)] == [10, 2]
        assert valid.labels.tolist() == LABELS[10:].tolist()
        np.testing.assert_allclose(image_of(valid[1])[..., 0], GRAY[11] / 256, atol=1e-6)
        mirrored = ld.RotatedMNIST(tmp_path, "valid", column_major=False, verify=False)
        np.testing.assert_allclose(image_of(mirrored[1])[..., 0], GRAY[11].T / 256, atol=1e-6)
        with pytest.raises(ValueError, match="holds 12 images, but the official file holds 12000"):
            ld.RotatedMNIST(tmp_path)

    def test_archive(self, tmp_path, monkeypatch):
        path = tmp_path / "mnist_rotation_new.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(AMAT, amat(GRAY, LABELS))
        assert len(ld.RotatedMNIST(tmp_path, verify=False)) == 10
        with pytest.raises(ValueError, match=r"has no member mnist_all_rotation_normalized_float_test\.amat"):
            ld.RotatedMNIST(tmp_path, "test", verify=False)
        with pytest.raises(ValueError, match=r"mnist_rotation_new\.zip has the digest md5"):
            ld.RotatedMNIST(tmp_path)
        known = "md5:" + hashlib.md5(path.read_bytes()).hexdigest()
        monkeypatch.setitem(_mnist._ROTATED.digests, path.name, known)
        monkeypatch.setitem(ld.RotatedMNIST._counts, "train", 12)
        assert len(ld.RotatedMNIST(tmp_path)) == 10
        path.write_bytes(path.read_bytes()[:3000])
        with pytest.raises(ValueError, match="is not a complete zip archive"):
            ld.RotatedMNIST(tmp_path, verify=False)

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda text: text[:-40], "is not a table of numbers .*columns changed"),
            (lambda text: text.replace("e", "z", 1), "is not a table of numbers"),
            (lambda text: "", "is empty"),
            (lambda text: "0 1 2\n", "has 3 numbers per row, expected 784"),
            (lambda text: amat(GRAY.astype(float) * 2, LABELS), r"intensities outside \[0, 1\]"),
            (lambda text: amat(GRAY * np.nan, LABELS), r"intensities outside \[0, 1\]"),
            (lambda text: amat(GRAY, LABELS + 0.5), "labels that are not in 0 .. 9"),
        ],
    )
    def test_damaged(self, tmp_path, damage, message):
        (tmp_path / AMAT).write_text(damage(amat(GRAY, LABELS)))
        with pytest.raises(ValueError, match=message):
            ld.RotatedMNIST(tmp_path, verify=False)


class TestCifar:
    def test_cifar10(self, tmp_path, monkeypatch):
        (tmp_path / "cifar-10-batches-bin").mkdir()
        write_cifar(tmp_path / "cifar-10-batches-bin")
        dataset = ld.CIFAR10(tmp_path, verify=False)
        assert dataset.labels.tolist() == 5 * list(range(10))
        np.testing.assert_allclose(image_of(dataset[13]), COLOR[3] / 255, atol=1e-7)
        split = {s: ld.CIFAR10(tmp_path, s, validation=10, verify=False)._indices for s in ("train", "valid")}
        assert [len(split["train"]), len(split["valid"])] == [40, 10]
        assert not set(split["train"]) & set(split["valid"])
        with pytest.raises(ValueError, match="batches-bin holds 50 images, but the official file holds 50000"):
            ld.CIFAR10(tmp_path)
        monkeypatch.setitem(ld.CIFAR10._counts, "test", 10)
        assert len(ld.CIFAR10(tmp_path, "test")) == 10

    def test_cifar100_has_fine_labels(self, tmp_path):
        (tmp_path / "test.bin").write_bytes(cifar(COLOR, LABELS[:10] + 90, coarse=bytes([19])))
        dataset = ld.CIFAR100(tmp_path, "test", verify=False)
        assert (dataset.num_classes, dataset.labels.tolist()) == (100, list(range(90, 100)))
        np.testing.assert_allclose(image_of(dataset[3]), COLOR[3] / 255, atol=1e-7)

    @pytest.mark.parametrize(
        ("kind", "content", "message"),
        [
            (ld.CIFAR10, b"", "test_batch.bin has 0 bytes, expected a multiple of 3073"),
            (ld.CIFAR10, cifar(COLOR, LABELS[:10])[:-1], "test_batch.bin has 30729 bytes, expected a multiple of 3073"),
            (ld.CIFAR10, cifar(COLOR, LABELS[:10] + 1), "test_batch.bin has labels up to 10, expected 0 .. 9"),
            (ld.CIFAR100, cifar(COLOR, LABELS[:10]), "test.bin has 30730 bytes, expected a multiple of 3074"),
            (ld.CIFAR100, cifar(COLOR, LABELS[:10] + 91, b"0"), "test.bin has labels up to 100, expected 0 .. 99"),
        ],
    )
    def test_damaged(self, tmp_path, kind, content, message):
        (tmp_path / message.split()[0]).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            kind(tmp_path, "test", verify=False)


class TestPatchCamelyon:
    def test_lazy_and_in_workers(self, tmp_path):
        images, labels = write_pcam(tmp_path)
        dataset = ld.PatchCamelyon(tmp_path, "test", verify=False)
        np.testing.assert_allclose(image_of(dataset[2]), images[2] / 255, atol=1e-7)
        assert len(pickle.dumps(dataset)) < 3_000
        copied = pickle.loads(pickle.dumps(dataset))
        assert torch.equal(copied[4].x, dataset[4].x)
        batches = list(DataLoader(dataset, batch_size=2, num_workers=2))
        assert torch.cat([batch.y for batch in batches]).tolist() == labels.tolist()
        found = torch.cat([batch.x for batch in batches]).numpy()
        np.testing.assert_allclose(found, images.reshape(-1, 3) / 255, atol=1e-7)

    def test_damaged(self, tmp_path):
        images, labels = write_pcam(tmp_path)
        with pytest.raises(ValueError, match=rf"{PCAM_X} has the digest md5"):
            ld.PatchCamelyon(tmp_path, "test")
        for bad, marks, message in (
            (images[:, :32], labels, "expected uint8 of .96, 96, 3."),
            (images / 255, labels, "has float64 images"),
            (images, labels[:3], f"{PCAM_Y} has 3 labels, but there are 5 images"),
            (images, labels * 2, rf"{PCAM_Y} has y in 0 \.\. 2, expected 0 \.\. 1"),
        ):
            write_pcam(tmp_path, bad, marks)
            with pytest.raises(ValueError, match=message):
                ld.PatchCamelyon(tmp_path, "test", verify=False)
        path = tmp_path / PCAM_X
        path.write_bytes(path.read_bytes()[:5000])
        with pytest.raises(ValueError, match="is not a complete HDF5 file"):
            ld.PatchCamelyon(tmp_path, "test", verify=False)
        path.write_bytes((tmp_path / PCAM_Y).read_bytes())
        with pytest.raises(ValueError, match="has no array 'x', only y"):
            ld.PatchCamelyon(tmp_path, "test", verify=False)


class TestArchives:
    CASES = (
        (ld.RotatedMNISTRecipe, "mnist_rot_recipe.npz", "x_valid", "y_valid", "valid", GRAY),
        (ld.FashionMNIST900, "fashion_mnist_900.npz", "x", "y", "all", GRAY),
        (ld.CIFAR10Subset, "cifar10_subset.npz", "x_test", "y_test", "test", COLOR),
    )

    @pytest.mark.parametrize(("kind", "name", "x", "y", "split", "images"), CASES)
    def test_reads_and_refuses(self, tmp_path, kind, name, x, y, split, images):
        path, labels = tmp_path / name, LABELS[: len(images)]
        np.savez(path, **{x: images, y: labels})
        dataset = kind(tmp_path, split, verify=False)
        np.testing.assert_allclose(image_of(dataset[1]).squeeze(), images[1] / 255, atol=1e-7)
        path.write_bytes(path.read_bytes()[:200])
        with pytest.raises(ValueError, match=r"is not a complete zip archive"):
            kind(tmp_path, split, verify=False)

    def test_fashion_split(self, tmp_path):
        images = np.zeros((900, 28, 28), dtype=np.uint8)
        np.savez(tmp_path / "fashion_mnist_900.npz", x=images, y=np.repeat(np.arange(10), 90))
        splits = ("train", "valid", "test")
        parts = [ld.FashionMNIST900(tmp_path, split, verify=False) for split in splits]
        assert [part.labels.bincount().tolist() for part in parts] == [[n] * 10 for n in (60, 10, 20)]
        assert sorted(np.concatenate([part._indices for part in parts])) == list(range(900))


class TestTransforms:
    @pytest.mark.parametrize("quarters", [-1, 0, 1, 2, 3, 4, 7, 100_001])  # the last one is rounded
    @pytest.mark.parametrize("size", [4, 5])
    def test_quarter_turns_are_exact_and_counter_clockwise(self, quarters, size):
        image = RANDOM.random((size, size, 2)).astype(np.float32)
        data, angle = ld.image_to_data(image), quarters * math.pi / 2
        expected = ld.image_to_data(np.rot90(image, quarters).copy())
        turned = ld.RotatePoints(angle)(data)
        at = {tuple(p): f for p, f in zip(turned.pos.tolist(), turned.x.tolist(), strict=True)}
        wanted = {tuple(p): f for p, f in zip(expected.pos.tolist(), expected.x.tolist(), strict=True)}
        assert at == wanted
        for order in range(4):
            resampled = ld.RotateImage(angle, order)(data)
            torch.testing.assert_close(resampled.x, expected.x, atol=1e-6, rtol=0)
            assert torch.equal(resampled.pos, data.pos)

    def test_direction_of_any_angle(self):
        pos = ld.RotatePoints(math.pi / 6)(Data(pos=torch.tensor([[1.0, 0.0]]))).pos
        torch.testing.assert_close(pos, torch.tensor([[math.sqrt(3) / 2, 0.5]]))
        image = np.zeros((31, 31), dtype=np.float32)
        image[15, 22:29] = 1  # a bar to the right of the center
        data = ld.RotateImage(math.pi / 6, order=1)(ld.image_to_data(image))
        x, y = (data.pos * data.x).sum(0) / data.x.sum()
        assert math.atan2(y, x) == pytest.approx(math.pi / 6, abs=1e-3)
        assert data.x.min() >= 0
        assert data.x.max() <= 1

    def test_averages_of_pixels_turn_with_the_image(self):
        image = np.random.default_rng(0).random((4, 6)).astype(np.float32)
        data = ld.image_to_data(image, 3)
        averaged = ld.AveragePixels(2)(data)
        small = image.reshape(2, 2, 3, 2).mean(axis=(1, 3))
        wanted = ld.image_to_data(small, 3)
        torch.testing.assert_close(averaged.x, wanted.x)
        torch.testing.assert_close(averaged.pos, wanted.pos)
        assert averaged.grid.tolist() == [[2, 3]]
        assert averaged.y.tolist() == [3]
        turn = ld.RotatePoints(0.4)
        torch.testing.assert_close(ld.AveragePixels(2)(turn(data)).pos, turn(averaged).pos)
        batch = ld.AveragePixels(2)(Batch.from_data_list([data, turn(data)]))
        torch.testing.assert_close(batch.pos, torch.cat([averaged.pos, turn(averaged).pos]))
        assert batch.batch.tolist() == [0] * 6 + [1] * 6

    def test_averages_of_voxels_are_means_of_cubes(self):
        pos = torch.cartesian_prod(torch.arange(4.0), torch.arange(2.0), torch.arange(6.0))
        values = torch.randn(4, 2, 6, generator=torch.manual_seed(0))
        data = Data(
            x=values.view(-1, 1), pos=pos @ torch.linalg.qr(torch.randn(3, 3)).Q, grid=torch.tensor([[4, 2, 6]])
        )
        averaged = ld.AveragePixels(2)(data)
        cube = (2 * torch.tensor([1, 0, 2]))[:, None] + torch.tensor([0, 1])
        torch.testing.assert_close(averaged.x[1 * 3 + 2, 0], values[2:4, 0:2, 4:6].mean())
        inside = torch.stack([(pos[:, axis, None] == cube[axis]).any(1) for axis in range(3)]).all(0)
        torch.testing.assert_close(averaged.pos[1 * 3 + 2], data.pos[inside].mean(0) / 2)
        assert averaged.grid.tolist() == [[2, 1, 3]]

    def test_inputs_stay_as_they_were(self):
        data = ld.image_to_data(GRAY[0], 3)
        before = data.clone()
        transforms = [
            ld.RotatePoints(1.0),
            ld.RandomRotatePoints(1),
            ld.RandomScalePoints(1),
            ld.TransformPoints([[1, 0], [0, -1]]),
            ld.RotateImage(0.3),
            ld.RandomWarpImage(1, bend=1.0),
            ld.RandomCrop(1),
            ld.Standardize(0.5, 0.5),
            ld.AveragePixels(1),
            ld.DropBackground(0.1),
            ld.DropPoints(1, 0.5),
        ]
        for transform in transforms:
            assert transform(data) is not data
            assert "object at" not in repr(transform)
            assert torch.equal(pickle.loads(pickle.dumps(transform))(data).y, before.y)
        assert all(torch.equal(data[key], before[key]) for key in before.keys())
        both = Compose([ld.RotatePoints(0.2), ld.RotatePoints(-0.2)])(data)
        torch.testing.assert_close(both.pos, data.pos, atol=1e-5, rtol=0)

    def test_matrices_are_copies_of_arrays_in_any_order(self):
        matrix, shift = np.array([[0.0, -1.0], [1.0, 0.0]])[::-1, ::-1], np.array([1.0, 2.0])[::-1]
        data = Data(pos=torch.tensor([[3.0, 4.0]]))
        points, fields = ld.TransformPoints(matrix), ld.TransformFields(matrix, shift)
        matrix[:], shift[:] = 0.0, 0.0
        assert points(data).pos.tolist() == [[4.0, -3.0]]
        assert fields(data).pos.tolist() == [[6.0, -2.0]]

    def test_batch_of_clouds(self):
        (batch,) = DataLoader(small_images(), batch_size=6)
        turned = ld.RotatePoints(math.pi / 2)(batch)
        assert isinstance(turned, Batch)
        assert torch.equal(turned.pos, torch.stack([-batch.pos[:, 1], batch.pos[:, 0]], dim=1))

    @pytest.mark.parametrize(
        ("transform", "name"), [(ld.RotatePoints(0.4), "pos"), (ld.RotateImage(0.4), "x"), (ld.AveragePixels(2), "x")]
    )
    def test_integers_are_not_rounded(self, transform, name):
        data = ld.image_to_data(np.eye(4))
        data[name] = data[name].long()
        with pytest.raises(ValueError, match=f"data.{name}: expected a floating tensor, got torch.int64"):
            transform(data)

    def test_random_transforms_are_independent(self):
        """Transforms with the default seed draw independent numbers."""
        turn, scale, found = ld.RandomRotatePoints(), ld.RandomScalePoints(), []
        for _ in range(300):
            pos = scale(turn(Data(pos=torch.tensor([[1.0, 0.0]], dtype=torch.float64)))).pos[0]
            found.append([math.atan2(pos[1], pos[0]), math.log(pos.norm())])
        assert abs(np.corrcoef(np.array(found).T)[0, 1]) < 0.2

    def test_workers_that_construct_a_transform_draw_different_numbers(self):
        """Control: all workers had the stream of the seed, in each epoch again."""
        turned = DataLoader(TurnedInWorkers(), batch_size=1, num_workers=2)
        first = [float(batch.pos[0, 0]) for _ in range(2) for batch in turned]
        assert len(set(first)) == len(first) == 8

    def test_splines_do_not_leave_the_range_of_intensities(self):
        square = np.zeros((12, 12), dtype=np.float32)
        square[3:9, 3:9] = 1.0
        values = ld.RotateImage(0.5)(ld.image_to_data(square)).x
        assert values.min() == 0
        assert values.max() == 1

    def test_the_seed_counts_where_torch_is_seeded_for_each_item(self):
        turns, data = [ld.RandomRotatePoints(seed) for seed in (0, 1)], Data(pos=torch.eye(2))

        def turned(number):
            with torch.random.fork_rng():
                torch.manual_seed(torch.initial_seed() + 1)
                return turns[number](data).pos

        assert torch.equal(turned(0), turned(0))
        assert not torch.equal(turned(0), turned(1))

    def test_random_rotation_follows_its_seed(self):
        data = Data(pos=torch.tensor([[1.0, 0.0]]))

        def angles(transform, count=200):
            return [math.atan2(*transform(data).pos[0].flip(0).tolist()) for _ in range(count)]

        first = angles(ld.RandomRotatePoints(5))
        assert first == angles(ld.RandomRotatePoints(5))
        assert first != angles(ld.RandomRotatePoints(6))
        assert len(set(first)) == 200
        assert min(first) < -3
        assert max(first) > 3
        assert max(map(abs, angles(ld.RandomRotatePoints(5, max_angle=0.1)))) <= 0.1 + 1e-6

    def test_scaled_digits(self):
        """Digits are dilated by factors with uniformly distributed logarithms; intensities stay."""
        digit = ld.Digits("test")[0]
        transform = ld.RandomScalePoints(5, least=0.5, most=4.0)
        scaled = [transform(digit) for _ in range(300)]
        factors = np.array([float(data.pos[0, 0] / digit.pos[0, 0]) for data in scaled])
        for data, factor in zip(scaled[:5], factors, strict=False):
            torch.testing.assert_close(data.pos, digit.pos * factor)
            assert torch.equal(data.x, digit.x)
        assert factors.min() > 0.5
        assert factors.max() < 4.0
        assert np.histogram(np.log2(factors), bins=3, range=(-1, 2))[0] == pytest.approx([100] * 3, abs=25)
        again = ld.RandomScalePoints(5, least=0.5, most=4.0)
        assert torch.equal(again(digit).pos, scaled[0].pos)

    @pytest.mark.parametrize(
        ("options", "spread"),
        [
            ({}, (4.24, 4.24, 0.0)),  # 6 / sqrt(2)
            ({"max_angle": 0.5}, (0.22, 1.68, 0.0)),
            ({"max_angle": 0.0, "max_scale": 1.3}, (0.92, 0.0, 0.92)),
            ({"max_angle": 0.0, "max_shift": 2.0}, (1.15, 1.15, 1.15)),  # 2 / sqrt(3)
            ({"max_angle": 0.0, "bend": 0.5}, (0.45, 0.45, 0.45)),  # averaged over the spot
            ({"max_angle": 0.0}, (0.0, 0.0, 0.0)),
        ],
    )
    def test_warps_move_a_spot(self, options, spread):
        """The mean position of a bright spot varies as asked: standard deviations of x, y and radius, in pixels."""
        pos = ld.grid_positions(29, 29)
        spot = ld.image_to_data(torch.exp(-(pos - torch.tensor([6.0, 0.0])).square().sum(1) / 8).reshape(29, 29))
        transform = ld.RandomWarpImage(3, **options)
        warped = [transform(spot).x for _ in range(300)]
        found = torch.stack([(x * pos).sum(0) / x.sum() for x in warped])
        measured = torch.cat([found, found.norm(dim=1, keepdim=True)], dim=1).std(dim=0)
        torch.testing.assert_close(measured, torch.tensor(spread), atol=0.01, rtol=0.12)  # three standard deviations
        assert torch.equal(ld.RandomWarpImage(3, **options)(spot).x, warped[0])

    def test_crops_of_a_turned_image_are_the_turned_crops(self):
        image = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))
        turns = [torch.rot90, lambda x: x.flip(1)]  # they generate all turns and reflections of a square

        def crops(source, flip):
            torch.manual_seed(0)
            transform, data = ld.RandomCrop(1, flip=flip), ld.image_to_data(source)
            return {ld.data_to_image(transform(data))[..., 0] for _ in range(300)}

        def distinct(images):
            return {tuple(found.flatten().tolist()) for found in images}

        plain, mirrored = crops(image, False), crops(image, True)
        assert [len(distinct(plain)), len(distinct(mirrored))] == [9, 18]
        assert {tuple(image.flatten().tolist()), tuple(image.flip(1).flatten().tolist())} < distinct(mirrored)
        for turn in turns:
            assert distinct(crops(turn(image), False)) == distinct(map(turn, plain))
            halves = [torch.rot90(turn(found), 2 * half) for found in mirrored for half in (0, 1)]
            assert distinct(crops(turn(image), True)) < distinct(halves)

    def test_half_of_the_crops_are_mirrored(self):
        data = ld.image_to_data(torch.rand(4, 4, generator=torch.Generator().manual_seed(0)))
        torch.manual_seed(0)
        mirrored = sum(not torch.equal(ld.RandomCrop(0)(data).x, data.x) for _ in range(400))
        assert 160 < mirrored < 240  # four standard deviations

    def test_points_with_one_channel_of_signal_are_kept(self):
        data = Data(x=torch.tensor([[0.0, 1.0], [0.0, 0.0], [-1.0, 0.0]]), pos=torch.rand(3, 2))
        assert torch.equal(ld.DropBackground()(data).pos, data.pos[[0, 2]])

    def test_background_is_dropped_wherever_it_lies(self):
        data = ld.image_to_data(np.array([[0, 255], [26, 128]], dtype=np.uint8), 3)
        data.weight, data.edge_index = torch.arange(4.0), torch.tensor([[1, 2, 3], [3, 1, 0]])
        ink = ld.DropBackground()(data)
        assert torch.equal(ink.pos, data.pos[1:])
        assert torch.equal(ink.weight, data.weight[1:])
        assert ink.edge_index.tolist() == [[0, 1], [2, 0]]  # edges 1 to 3 and 2 to 1, renumbered
        assert ink.y.tolist() == [3]
        assert (ink.raster.tolist(), ink.pixel.tolist()) == ([[2, 2]], [[0, 1], [1, 0], [1, 1]])
        assert "grid" not in ink
        assert ld.DropBackground(0.2)(ink).pixel.tolist() == [[0, 1], [1, 1]]
        turn = ld.RotatePoints(0.4)
        dark, turned = ld.DropBackground(0.2)(turn(data)), turn(ld.DropBackground(0.2)(data))
        assert torch.equal(dark.pos, turned.pos)
        assert len(dark.pos) == 2
        empty = Data(x=torch.zeros(3, 1), pos=torch.rand(3, 2))
        assert torch.equal(ld.DropBackground()(empty).pos, empty.pos[:1])
        crystal = Data(x=torch.tensor([[0.0], [1.0], [1.0]]), pos=torch.rand(3, 3), num_nodes=3, mass=np.arange(3))
        crystal.cell, crystal.pbc = torch.eye(3), torch.ones(3, dtype=torch.bool)
        ink = ld.DropBackground()(crystal)
        assert (ink.num_nodes, ink.mass.tolist(), ink.cell.shape, ink.pbc.shape) == (2, [1, 2], (3, 3), (3,))

    def test_missing_pixels(self):
        image = ld.image_to_data(np.arange(100, dtype=np.uint8).reshape(10, 10), 3)
        transform = ld.DropPoints(2, share=0.25)
        dropped = [transform(image) for _ in range(100)]
        assert sum(len(data.pos) for data in dropped) == pytest.approx(7500, abs=170)  # four standard deviations
        for data in dropped[:3]:
            kept = (data.x[:, 0] * 255).round().long()
            assert torch.equal(data.pos, image.pos[kept])
            assert data.y == 3
            assert data.raster.tolist() == [[10, 10]]
            assert torch.equal(data.pixel, torch.stack([kept // 10, kept % 10], dim=1))
            assert "grid" not in data
        assert not torch.equal(dropped[0].x, dropped[1].x[: len(dropped[0].x)])
        assert torch.equal(ld.DropPoints(2, share=0.25)(image).x, dropped[0].x)
        assert all(len(ld.DropPoints(seed, share=0.999)(image).pos) >= 1 for seed in range(5))

    test_bad_input = staticmethod(
        refuses(
            (lambda: ld.RotatePoints(math.nan), "angle: expected a finite number, got nan"),
            (lambda: ld.RandomCrop(-1), "padding: expected an integer of at least 0, got -1"),
            (lambda: ld.RandomCrop()(ld.RotatePoints(1.0)(ld.image_to_data(GRAY[0]))), "expected the upright"),
            (lambda: ld.RotateImage(math.inf), "angle: expected a finite"),
            (lambda: ld.RotateImage(0, order=6), r"order: expected one of \(0, 1, 2, 3, 4, 5\), got 6"),
            (lambda: ld.RandomRotatePoints(-1), "seed: expected an integer of at least 0, got -1"),
            (lambda: ld.RandomRotatePoints(0, max_angle=-1), "max_angle: expected a finite number of at least 0"),
            (lambda: ld.RandomWarpImage(max_scale=0.9), "max_scale: expected a finite number of at least 1, got 0.9"),
            (lambda: ld.RandomWarpImage(bend=-1.0), "bend: expected a finite number of at least 0, got -1.0"),
            (lambda: ld.RandomScalePoints(least=2.0, most=1.0), "0 < least <= most, got 2.0 and 1.0"),
            (lambda: ld.RandomScalePoints(least=0.0), "0 < least <= most, got 0.0"),
            (lambda: ld.RandomRotatePoints()(Batch.from_data_list([Data()])), "got a Batch"),
            (lambda: ld.TransformPoints([[1, 2]]), r"matrix: expected a square matrix, got .1, 2."),
            (lambda: ld.TransformPoints([[math.nan]]), "matrix: expected finite"),
            (lambda: ld.RotatePoints(1)(Data(pos=torch.zeros(4, 3))), r"data.pos: expected .points, 2., got .4, 3."),
            (lambda: ld.RotatePoints(1)(Data()), "got nothing"),
            (lambda: ld.Standardize(0, 0), "mean, std: .* positive finite numbers"),
            (lambda: ld.Standardize(math.nan, 1), "mean: expected a finite number"),
            (lambda: ld.Standardize([0, 0], [1]), "mean, std: expected the same length"),
            (lambda: ld.Standardize([0, 0], [1, 1])(ld.image_to_data(GRAY[0])), "data.x: expected 2 floating channels"),
            (lambda: ld.RotateImage(1)(ld.Standardize(0.5, 0.1)(ld.image_to_data(GRAY[0]))), "standardize after"),
            (
                lambda: ld.RandomWarpImage()(ld.Standardize(0.5, 0.1)(ld.image_to_data(GRAY[0]))),
                "standardize after RandomWarpImage",
            ),
            (lambda: ld.RotateImage(1)(mixed()), "expected the upright"),
            (lambda: ld.AveragePixels(0), "size: expected an integer of at least 1"),
            (lambda: ld.AveragePixels(3)(ld.image_to_data(np.zeros((6, 4)))), r"multiples of 3, got ..6, 4.."),
            (lambda: ld.AveragePixels()(Data(x=torch.zeros(4, 1), pos=torch.zeros(4, 2))), "got none"),
            (lambda: ld.DropPoints(share=1.0), "share: expected a probability in .0, 1., got 1.0"),
            (lambda: ld.DropPoints()(Batch.from_data_list([Data()])), "one cloud, got a Batch"),
            (lambda: ld.DropBackground(-1), "threshold: expected a finite number of at least 0, got -1"),
            (lambda: ld.DropBackground()(Batch.from_data_list([Data(x=torch.ones(1, 1))])), "one cloud, got a Batch"),
            (lambda: ld.DropPoints()(Data(pos=torch.zeros(3, 3), face=torch.zeros(3, 1))), "points without faces"),
        )
    )


def mixed():
    """Return an image whose pixels are not in raster order."""
    image = ld.image_to_data(GRAY[0])
    image.pos = image.pos.flip(0)
    return image


@pytest.mark.parametrize(
    "transform", [ld.RotateImage(1.0), ld.RandomWarpImage(), ld.RandomCrop(1), ld.AveragePixels(2)], ids=repr
)
def test_labels_of_pixels_do_not_stay_behind(transform):
    """Labels of pixels would belong to other pixels afterwards."""
    image = ld.image_to_data(np.zeros((4, 6)), label=1)
    assert transform(image).y == 1
    for name, value in (("y", torch.zeros(24, dtype=torch.int64)), ("mask", torch.ones(24, dtype=torch.bool))):
        labeled = image.clone()
        labeled[name] = value
        with pytest.raises(ValueError, match=f"which alone are transformed, got {name} for each of 24 pixels"):
            transform(labeled)
    one = ld.image_to_data(np.zeros((1, 1)), label=1)
    assert isinstance(transform, ld.AveragePixels) or transform(one).y == 1
