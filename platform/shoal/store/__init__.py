"""Files that need not lie on a disk: one `Store` over a folder, S3, Google Cloud Storage or Azure.

Called by all that must outlive a host or be seen by several. Knows nothing of what it stores. Names are imported at
their first use: a mirror needs no client of a bucket.
"""

from typing import TYPE_CHECKING

from shoal.plugins.lazy import load_on_demand

if TYPE_CHECKING:
    from shoal.store.bucket_path import BucketPath, fetch, get_size_bytes, is_url, locate, open_source
    from shoal.store.cache import BlobCache
    from shoal.store.location import open_shared_store, open_store, require_location, store_url, store_variable
    from shoal.store.mirror import Mirror
    from shoal.store.store import Entry, KeyChanged, KeyTaken, Store, StoreAway, Tagged, TaggedUpdate, update

__getattr__ = load_on_demand(__name__)
