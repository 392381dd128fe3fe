"""Adapters that present other interfaces as `reverie.api.Env`."""
