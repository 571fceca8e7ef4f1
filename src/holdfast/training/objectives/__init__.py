"""What a run minimises: one file per method, `core` for what several share. Importing the package registers them."""

from importlib import import_module
from pkgutil import iter_modules

for _file in iter_modules(__path__, f"{__name__}."):
    import_module(_file.name)
