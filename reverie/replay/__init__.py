"""The replay buffer: storage, sampling, saving and the copy to the device."""
