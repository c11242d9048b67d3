"""Images and grids of the sphere in all the forms in which the same values are written."""

from __future__ import annotations

import struct
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

import lieattn_datasets as ld
from tests.fuzz._target import Finding, Target, Verdict, named
from tests.test_data_folders import png

_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # of the kinds of pixels of PNG: gray, color, palette, with transparency
_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
_TURNS = {  # of EXIF: what shows the stored pixels upright
    1: lambda image: image,
    2: lambda image: image[:, ::-1],
    3: lambda image: image[::-1, ::-1],
    4: lambda image: image[::-1],
    5: lambda image: image.swapaxes(0, 1),
    6: lambda image: np.rot90(image, -1),
    7: lambda image: image[::-1, ::-1].swapaxes(0, 1),
    8: np.rot90,
}


@st.composite
def _images(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(sorted(_CHANNELS)))
    return {
        "kind": kind,
        "bits": draw(st.sampled_from(_DEPTHS[kind])),
        "shape": draw(st.tuples(st.integers(1, 9), st.integers(1, 9))),
        "turn": draw(st.sampled_from([None, None, *_TURNS])),
        "transparent": draw(st.booleans()),
        "animated": draw(st.sampled_from([None, None, "first", "apart"])),
        "constant": draw(st.booleans()),
        "color": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def _check_image(case: dict[str, Any]) -> Finding | Verdict:
    content, expected = _write(case)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "a").mkdir()
        Path(folder, "a", "0.png").write_bytes(content)
        images = ld.ImageFolder(folder, "all", color=case["color"])
    found = ld.data_to_image(images[0]).numpy()
    if not case["color"]:
        expected = expected @ np.array([[0.299], [0.587], [0.114]])
    exact = 1 / (65535 if _is_deep(case) else 255)
    right = found.shape == expected.shape and np.abs(found - expected).max() < (0.01 if case["color"] else 0.6) * exact
    return Verdict.CORRECT if right else Finding(Verdict.SILENT, f"other pixels: {case}")


def _is_deep(case: dict[str, Any]) -> bool:
    """Return whether pixels are read with 16 bits; of others Pillow reads the upper 8 bits."""
    return case["bits"] == 16 and case["kind"] == 0


def _write(case: dict[str, Any]) -> tuple[bytes, np.ndarray]:
    """Return a PNG file and the image ``[height, width, 3]`` in [0, 1] that it shows."""
    rng, kind, bits, (height, width) = np.random.default_rng(case["seed"]), case["kind"], case["bits"], case["shape"]
    pixels = rng.integers(0, 2**bits, (height, width, _CHANNELS[kind]))
    if case["constant"]:
        pixels[:] = pixels[0, 0]
    digits = (pixels.reshape(height, -1)[..., None] >> np.arange(bits - 1, -1, -1)) & 1
    rows = b"".join(b"\0" + np.packbits(row.reshape(-1)).tobytes() for row in digits)
    before, after, later = [], [], b"\0" + bytes(1 + width * _CHANNELS[kind] * bits // 8)
    if case["turn"]:
        tag = struct.pack(">HHIHH", 0x0112, 3, 1, case["turn"], 0)
        before.append((b"eXIf", b"MM\0*\0\0\0\x08\0\x01" + tag + bytes(4)))
    if case["animated"]:
        before.append((b"acTL", struct.pack(">II", 1, 0)))
        frame = struct.pack(">IIIIIHHBB", 0, width, 1, 0, 0, 1, 10, 0, 0)
        if case["animated"] == "first":  # the image itself is the first of the animation
            frame = struct.pack(">IIIIIHHBB", 0, width, height, 0, 0, 1, 10, 0, 0)
            before.append((b"fcTL", frame))
        else:
            after += [(b"fcTL", frame), (b"fdAT", struct.pack(">I", 1) + zlib.compress(later))]
    if kind == 3:
        palette = rng.integers(0, 256, (2**bits, 3), dtype=np.uint8)
        before.append((b"PLTE", palette.tobytes()))
        shown = palette[pixels[..., 0]] / 255
    else:
        values = pixels[..., : 3 if kind in (2, 6) else 1]
        read = values / (2**bits - 1) if bits < 16 or _is_deep(case) else (values >> 8) / 255
        shown = np.broadcast_to(read, (height, width, 3))
    if case["transparent"] and kind in (0, 2, 3):
        before.append((b"tRNS", bytes(2**bits) if kind == 3 else bytes(2 * _CHANNELS[kind])))
    return png(width, height, rows, bits, kind, before, after), _TURNS[case["turn"] or 1](shown)


@st.composite
def _grids(draw: st.DrawFn) -> dict[str, Any]:
    step = draw(st.sampled_from([0.5, 2.5, 15.0, 30.0]))
    middles = draw(st.booleans())  # without rows at the poles
    rows = draw(st.integers(1, min(12, int(180 / step) + (not middles))))
    first = draw(
        st.sampled_from([-90 + step / 2 * middles, 90 - (rows - 1 + 0.5 * middles) * step, -(rows - 1) * step / 2])
    )
    start, columns = draw(st.sampled_from([0.0, -180.0, -step, 7.25])), draw(st.integers(1, 12))
    if draw(st.booleans()):
        step_of_columns = 360 / columns
        columns += draw(st.integers(0, 1)) if columns > 1 else 0  # with the first column again at the end
    else:
        step_of_columns = step
    return {
        "latitude": draw(st.sampled_from([1, -1])) * (first + step * np.arange(rows)),
        "longitude": draw(st.sampled_from([1, -1])) * (start + step_of_columns * np.arange(columns)),
        "radians": draw(st.booleans()),
        "units": draw(st.booleans()),
        "dtype": draw(st.sampled_from(["f4", "f8"])),
        "axis": draw(st.tuples(*[st.integers(-5, 5)] * 3)),
    }


def _check_grid(case: dict[str, Any]) -> Finding | Verdict:
    phi, lam = (np.deg2rad(case[name]) for name in ("latitude", "longitude"))
    directions = np.stack(np.broadcast_arrays(*_direction(phi[:, None], lam)), axis=-1)
    eastward = np.stack(np.broadcast_arrays(-np.sin(lam), np.cos(lam), 0 * phi[:, None]), axis=-1)
    wind = np.cross(case["axis"], directions)
    northward = np.cross(directions, eastward)
    angles = (phi, lam) if case["radians"] else (case["latitude"], case["longitude"])
    units = ("radians" if case["radians"] else "degrees") if case["units"] else None
    u, v = (wind * eastward).sum(axis=-1), (wind * northward).sum(axis=-1)
    try:
        pos, found = ld.wind_vectors(u, v, *(values.astype(case["dtype"]) for values in angles), units=units)
    except ValueError as error:
        return Verdict.NAMED if named(error, "latitude", "longitude") else Finding(Verdict.UNNAMED, f"{error}: {case}")
    distance = np.linalg.norm(pos[:, None] - directions.reshape(-1, 3), axis=-1)
    places = distance.min(axis=0).max() < 1e-5 and distance.min(axis=1).max() < 1e-5
    apart = np.linalg.norm(pos[:, None] - pos, axis=-1)[~np.eye(len(pos), dtype=bool)].min(initial=1.0) > 1e-5
    # One column at a pole does not determine the vector there.
    poles = (np.abs(pos[:, 2]) > 1 - 1e-9) & (
        len(lam) < 2 or not np.isclose(np.ptp(lam) + abs(lam[1] - lam[0]), 2 * np.pi)
    )
    right = np.abs(found - np.cross(case["axis"], pos))[~poles].max(initial=0) < 1e-4
    return Verdict.CORRECT if places and apart and right else Finding(Verdict.SILENT, f"other places or winds: {case}")


def _direction(phi: np.ndarray, lam: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.cos(phi) * np.cos(lam), np.cos(phi) * np.sin(lam), np.sin(phi)


TARGETS = {
    "image-files": Target("forms of images", _images(), _check_image, long=10_000, quick=100),
    "grids": Target("forms of grids", _grids(), _check_grid, long=10_000, quick=100),
}
