"""What the tests of several frameworks share."""
