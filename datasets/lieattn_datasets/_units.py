"""Units of targets (CODATA 2018)."""

from dataclasses import dataclass

ENERGIES = ("eV", "meV", "Ha", "kcal/mol")
DIPOLES = ("D", "e angstrom", "e bohr")
LENGTHS = ("bohr", "angstrom")

_FACTORS = {
    "eV": ("energy", 1.0),
    "meV": ("energy", 1e-3),
    "Ha": ("energy", 27.211386245988),
    "kcal/mol": ("energy", 4184.0 / 96485.33212331),
    "D": ("dipole", 1.0),
    "e angstrom": ("dipole", 2.5417464739 / 0.529177210903),
    "e bohr": ("dipole", 2.5417464739),
    "angstrom": ("length", 1.0),
    "bohr": ("length", 0.529177210903),
}


@dataclass(frozen=True)
class Units:
    """Units of the results. Quantities other than energies, dipoles and lengths are not converted.

    Parameters
    ----------
    energy, dipole, length
        One of ``ENERGIES``, ``DIPOLES``, ``LENGTHS``.
    """

    energy: str = "eV"
    dipole: str = "D"
    length: str = "bohr"

    def __post_init__(self) -> None:
        for argument, allowed in (("energy", ENERGIES), ("dipole", DIPOLES), ("length", LENGTHS)):
            value = getattr(self, argument)
            if value not in allowed:
                raise ValueError(f"{argument}_unit: expected one of {', '.join(map(repr, allowed))}, got {value!r}")

    def convert(self, unit: str, power: int = 1) -> tuple[float, str]:
        """Return the factor that converts a number in ``unit ** power``, and the name of its new unit."""
        if unit not in _FACTORS:
            return 1.0, unit
        dimension, value = _FACTORS[unit]
        target: str = getattr(self, dimension)
        name = target if power == 1 else f"{target}^{power}"
        return float((value / _FACTORS[target][1]) ** power), name
