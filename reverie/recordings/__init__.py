"""The commands of `reverie data`: inspect, convert, split, record and export."""
