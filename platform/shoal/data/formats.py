"""Datasets in files by name: `from shoal.data.formats import Parquet`. Libraries and users' packages add them, in the
group `shoal.data_formats`; what they are made of is `shoal.data.file_dataset`."""

from shoal.plugins.lazy import load_on_demand

__getattr__ = load_on_demand(__name__, "shoal.data_formats")
