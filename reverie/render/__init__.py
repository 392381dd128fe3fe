"""Turn arrays into pictures. Knows no agent and no log; anyone may draw with it."""
