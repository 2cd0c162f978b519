// Catch, as a web page might have it: apples fall down a field of five columns and six rows, and a basket at the bottom
// moves left, stays, or moves right. An episode is five apples; each that is caught gives 1, each that is missed -1.

const COLUMNS = 5;
const ROWS = 6;
const APPLES = 5;

export class Catch {
  constructor(random = Math.random) {
    this.random = random;
    this.spaces = { observation: [4], action: 3 }; // left, stay, right
  }

  reset() {
    this.basket = Math.floor(COLUMNS / 2);
    this.apples = 0;
    this.drop();
    return this.observe();
  }

  drop() {
    this.column = Math.floor(this.random() * COLUMNS);
    this.row = 0;
  }

  step(action) {
    this.basket = Math.min(COLUMNS - 1, Math.max(0, this.basket + action - 1));
    this.row++;
    let reward = 0;
    if (this.row === ROWS - 1) {
      reward = this.column === this.basket ? 1 : -1;
      this.apples++;
      this.drop();
    }
    return { observation: this.observe(), reward, terminated: this.apples === APPLES, truncated: false };
  }

  /** Basket, apple's column and row in [-1, 1], and how far the apple is to the right. */
  observe() {
    const scale = (value, size) => (2 * value) / (size - 1) - 1;
    return [scale(this.basket, COLUMNS), scale(this.column, COLUMNS), scale(this.row, ROWS), (this.column - this.basket) / (COLUMNS - 1)];
  }

  /** Draw the field into a canvas. */
  draw(canvas) {
    const context = canvas.getContext('2d');
    const [width, height] = [canvas.width / COLUMNS, canvas.height / ROWS];
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.fillStyle = '#d8392b';
    context.beginPath();
    context.arc((this.column + 0.5) * width, (this.row + 0.5) * height, Math.min(width, height) / 3.2, 0, 7);
    context.fill();
    context.fillStyle = '#7a5230';
    context.beginPath();
    context.roundRect((this.basket + 0.08) * width, (ROWS - 0.62) * height, 0.84 * width, 0.5 * height, [2, 2, height / 4, height / 4]);
    context.fill();
  }
}

export default Catch;
