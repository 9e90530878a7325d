"""What `rotary.identify` is made of: probe calls, pairs measures, fit explains, examine tells."""
