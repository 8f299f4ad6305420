__version__ = "0.1.0"


def __getattr__(name: str):
    "The modules of the package: after `import isoreg`, `isoreg.istar` is imported when it is first asked for (PEP 562)."
    from importlib import import_module
    from pkgutil import iter_modules
    if name not in {m.name for m in iter_modules(__path__)}: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    from pkgutil import iter_modules
    return sorted({*globals(), *(m.name for m in iter_modules(__path__) if not m.name.startswith("_"))})
