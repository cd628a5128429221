"""The words every part of Lamina shares: the manifest schema and the errors. Imports none of the other parts."""

VERSION = "0.1.0"
PROJECT = "Lamina"
