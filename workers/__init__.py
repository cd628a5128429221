"""Who computes: one layer on a device, a worker's units, the Ray actors and their pool."""

from manifests.packages import find_serving_package

PROJECT = "Lamina"
find_serving_package()
