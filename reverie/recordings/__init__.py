"""The functions behind `reverie data`: inspect, convert, split, record and export."""
