"""The manifest's schema, the stored records and the errors. Imports no other part of Lamina."""

VERSION = "0.1.0"
PROJECT = "Lamina"
