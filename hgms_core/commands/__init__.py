"""Commands that live in modules of their own; :mod:`hgms_core.cli` imports one when it is asked for."""
