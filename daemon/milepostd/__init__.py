"""milepostd."""
