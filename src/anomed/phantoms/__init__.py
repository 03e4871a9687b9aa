"""Sources of images, one file each."""
