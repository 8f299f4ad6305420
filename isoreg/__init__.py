__version__ = "0.2.0"

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for editors and type checkers; at run time `__getattr__` below imports what is asked for
    from .dropout import apply_dropout as apply_dropout
    from .fisher import empirical_fisher as empirical_fisher
    from .geometry import outlier_dimensions as outlier_dimensions, two_nn as two_nn
    from .isoscore import isoscore as isoscore, isoscore_with_error as isoscore_with_error
    from .istar import CosReg as CosReg, IStar as IStar
    from .metric import IsoScore as IsoScore
    from .trainer import PenaltyTrainer as PenaltyTrainer

_HOME = {"IStar": "istar", "CosReg": "istar", "PenaltyTrainer": "trainer", "isoscore": "isoscore", "IsoScore": "metric",
         "isoscore_with_error": "isoscore", "outlier_dimensions": "geometry", "two_nn": "geometry",
         "empirical_fisher": "fisher", "apply_dropout": "dropout"}

def __getattr__(name: str):
    "The names above, and the modules: each is imported when it is first asked for (PEP 562)."
    from importlib import import_module
    from pkgutil import iter_modules
    home = _HOME.get(name, name)
    if home != name: return getattr(import_module(f"{__name__}.{home}"), name)  # the module isoscore is callable itself
    if name not in {m.name for m in iter_modules(__path__)}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")

def __dir__() -> list[str]:
    from pkgutil import iter_modules
    return sorted({*globals(), *_HOME, *(m.name for m in iter_modules(__path__) if not m.name.startswith("_"))})
