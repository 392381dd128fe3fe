"""The optimizer and its update rules: LaProp, Adam and AMSGrad."""
