"""A posterior scan through which the weights stream: a kernel a layer, none waiting."""
