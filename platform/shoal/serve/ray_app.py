"""The import path of an endpoint's application in `serve deploy` files: `import_path: shoal.serve.ray_app:build`.

The application is `shoal.serve.on_ray.serve_app`. Nothing within Shoal imports this module.
"""

from shoal.serve.on_ray.serve_app import build

__all__ = ["build"]
