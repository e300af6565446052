"""What a decoded token costs on the machine and the model at hand: `kvengine bench decode`."""
