"""Who computes: one layer on a device, a worker's units, the Ray actors and their pool."""

from manifests.packages import find_serving_package
from manifests.processor import settle_processor

PROJECT = "Lamina"
find_serving_package()
settle_processor()
