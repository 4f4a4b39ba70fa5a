//! Joins a host run and a target run into the five-stage model.
