"""Adapters from other environment interfaces to `reverie.api.Env`."""
