"""What a user adds to Shoal, in files of their own.

    # in the pyproject.toml of a package of yours
    [project.entry-points."shoal.libraries"]
    mine = "my_package.shoal_library:LIBRARY"

`shoal.libs` is built with the same means as a user's package: nothing else of Shoal imports it.
"""

from shoal.extend.library import Library

__all__ = ["Library"]
