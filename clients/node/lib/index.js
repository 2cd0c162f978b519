'use strict';

module.exports = {
  ...require('./client'),
  ...require('./play'),
  ...require('./policy'),
  ...require('./segment_builder'),
};
