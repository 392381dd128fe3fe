"""World models: RSSM (DreamerV3), dreamerv3-torch, VTA and Δ-IRIS."""
